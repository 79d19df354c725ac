"""What a scheme costs and keeps in real collectors of TorchRL: updates, frames per second, torn frames, files, threads.

    python bench/torchrl.py                      every policy, with 2, 4 and 8 workers
    python bench/torchrl.py --quick              4 workers, shmsync and TorchRL's SharedMem only, less than two minutes
    python bench/torchrl.py --contestants alias SharedMem --workers 2
    python bench/torchrl.py --out DIR            where torchrl.json and torchrl.md go (default ./bench-results)

The contestants are schemes, each in a trainer process of its own, with the same policy, environment (CartPole-v1) and
workers (spawned, as TorchRL does). They take turns in one run, and who has no turn is stopped. Only ratios mean
anything.

idle        update_policy_weights_() in a loop, from the call until every worker has the weights; all values change.
every batch an update between two batches of a MultiSyncCollector.
every 10 ms an update of a MultiAsyncCollector which fills a replay buffer (start()), from the trainer's main thread.

The weights are the "own" of the collector's policy, changed in place, or those of a separate "learner", given as a
TensorDict. On the CPU TorchRL makes the own policy's parameters shared memory: there its update copies nothing, and
workers see every write at once. alias=True does the same. "none" is the collector without any update.

torn        frames whose policy call saw weights change, or half written.
wrong       frames whose ("next", "policy_version"), and whose root "policy_version", is not that of their weights.
stall       how much longer than the median a policy call took, on average, in microseconds for each frame. Mostly that
            is the machine's own unrest: compare it with the row without updates.
updates/s   more than 10 ms for an update means that there are less than 100.

The speed's verdict looks at pairs of neighbouring turns: met when the median of their ratios is at least 1, even when
it is not but the upper quartile is, MISSED otherwise. After each case checksums prove that every worker has the weights
of the last update.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torchrl_report as report
from torchrl_report import ALIAS, LEARNER, NONE, OURS, OWN, THEIRS, Row

SHMSYNC = "shmsync.integrations.torchrl:ShmWeightSyncScheme"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: (SHMSYNC, {"timeout": 60.0}),
    ALIAS: (SHMSYNC, {"timeout": 60.0, "alias": True}),
    "shmsync, 2 slots": (SHMSYNC, {"timeout": 60.0, "slots": 2}),
    THEIRS: ("torchrl.weight_update:SharedMemWeightSyncScheme", {}),
    "TorchRL MultiProcess": ("torchrl.weight_update:MultiProcessWeightSyncScheme", {}),
}
CONTEXT = multiprocessing.get_context("spawn")
CASES = [  # policy, collector, and whether updates with idle workers and frames are measured
    ("CartPole, 5k parameters", "sync", True, False),
    ("200 tensors, 1.6 MB", "sync", True, False),
    ("CartPole, 5k + 100k parameters", "sync", False, True),
    ("CartPole, 5k + 100k parameters", "async", False, True),
    ("vision, 5M parameters", "sync", True, True),
    ("vision, 5M parameters", "async", False, True),
]
LEFT_OUT_OF_QUICK = 2  # the row of CASES whose place the next one and vision take
FRAMES = 32  # of a worker, in a batch
TURN = 0.1  # seconds of an idle turn


class Contestant:
    """A trainer process, and with it the workers of its collector."""

    def __init__(self, name: str, patience: float) -> None:
        self.name = name
        self._patience = patience
        self.trouble: str | None = None  # why it takes no part any more in this case
        self._process: Any = None
        self.start()

    def start(self) -> None:
        import torchrl_trainer

        self.trouble = None
        self._conn, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=torchrl_trainer.main, args=(*CONTESTANTS[self.name], theirs))
        self._process.start()
        theirs.close()

    def ask(self, command: str, *arguments: Any) -> Any:
        """None when it is in trouble, perhaps since now: TorchRL's schemes wait for ever for a dead worker."""
        if self.trouble is not None:
            return None
        try:
            self._signal(signal.SIGCONT)
            self._conn.send((command, *arguments))
            return self.answer()
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            print(f"{self.name}, {command}: {error!s}", flush=True)
            self.trouble = "hung" if isinstance(error, TimeoutError) else "failed"
            self.kill()
            return None

    def answer(self) -> Any:
        if not self._conn.poll(self._patience):
            raise TimeoutError("hung")
        state, answer = self._conn.recv()
        if state == "failed":
            raise RuntimeError(answer)
        return answer

    def turn(self, command: str, *arguments: Any) -> Any:
        """As ask(), and stopped afterwards."""
        answer = self.ask(command, *arguments)
        if self.trouble is None:
            self._signal(signal.SIGSTOP)
        return answer

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._conn.close()

    def stop(self) -> None:
        if self.trouble is None:
            self._signal(signal.SIGCONT)
            self._conn.close()
            self._process.join(20)
        self.kill()

    def _signal(self, number: int) -> None:
        """To everybody in its process group, which is not there before the first answer."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, TypeError):
            pass


def resources(contestants: list[Contestant]) -> list[Row]:
    """Files and threads, with one tensor and with many; in processes that have done nothing else yet."""
    rows: list[Row] = []
    for policy in ("1 tensor", "600 tensors"):
        for each in contestants:
            before = each.ask("count")
            each.ask("open", policy, "sync", 1, FRAMES)
            each.ask("idle", OWN, 0.0)
            during = each.ask("count")
            each.ask("close")
            after = each.ask("count")
            row: Row = {"policy": policy, "contestant": each.name, "trouble": each.trouble}
            if each.trouble is None:
                row["worker"] = during["worker"]
                for name, counts in (("trainer", during), ("left", after)):
                    row[name] = {what: counts["trainer"][what] - before["trainer"][what] for what in before["trainer"]}
            rows.append(row)
            report.show_resources(row)
            if each.trouble is not None:
                each.start()
                each.answer()
    return rows


def case(
    contestants: list[Contestant], policy: str, kind: str, workers: int, parts: tuple[bool, bool], options: Any
) -> Row:
    """Everybody's turns with one policy and one kind of collector."""
    idle, collect = parts
    for each in contestants:
        each.turn("open", policy, kind, workers, FRAMES)
    row: Row = {"policy": policy, "collector": kind, "workers": workers, "idle": [], "collect": []}
    for whose in (OWN, LEARNER) if idle else ():
        samples: dict[str, list[float]] = {each.name: [] for each in contestants}
        end = time.monotonic() + options.seconds
        while any(each.trouble is None for each in contestants):
            for each in contestants:
                samples[each.name] += each.turn("idle", whose, TURN) or []
            if time.monotonic() >= end:
                break
        row["idle"].append(report.idle(policy, workers, whose, samples))
        report.show_idle(row["idle"][-1])
    for whose in (NONE, LEARNER) if options.quick else (NONE, LEARNER, OWN) if collect else ():
        if not collect:
            break
        turns: dict[str, list[Row]] = {each.name: [] for each in contestants}
        for _ in range(options.rounds):
            for each in contestants:
                found = each.turn("collect", whose, options.seconds / 2)
                turns[each.name] += [] if found is None else [found]
        row["collect"].append(report.collect(policy, kind, workers, whose, turns))
        report.show_collect(row["collect"][-1])
    row["checksums"] = {each.name: each.ask("check") or each.trouble for each in contestants}
    for each in contestants:
        each.ask("close")
        if each.trouble is not None:
            each.start()
            each.answer()
    wrong = {name: result for name, result in row["checksums"].items() if result != "ok"}
    print(f"  checksums: {wrong or 'ok'}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 workers, two contestants, few turns")
    parser.add_argument("--workers", nargs="*", type=int, help="default: 2 4 8")
    parser.add_argument("--rounds", type=int, help="turns of collecting; default: 6, quick 3")
    parser.add_argument("--seconds", type=float, help="of a row with idle workers, and of two turns of collecting")
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of the policies' names; default: all")
    parser.add_argument("--contestants", nargs="*", help="parts of their names; default: all")
    parser.add_argument("--patience", type=float, default=60, help="seconds until a contestant counts as hung")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 6)
    options.seconds = options.seconds or (2.0 if options.quick else 4.0)
    names = [OURS, THEIRS] if options.quick else list(CONTESTANTS)
    if options.contestants:
        names = [name for name in CONTESTANTS if any(part in name for part in options.contestants)]
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    os.environ |= {"PYTHONWARNINGS": "ignore", "RL_LOGGING_LEVEL": "WARNING"}
    print(f"{multiprocessing.cpu_count()} processors, one thread to compute in each process", flush=True)
    contestants: list[Contestant] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # TorchRL leaves a folder for each replay buffer
        try:
            contestants += [Contestant(name, options.patience) for name in names]
            for each in contestants:
                each.answer()
            counts = resources(contestants)
            for workers in options.workers or ([4] if options.quick else [2, 4, 8]):
                for index, (policy, kind, *parts) in enumerate(CASES):
                    if any(part in policy for part in options.cases) and not (
                        options.quick and index == LEFT_OUT_OF_QUICK
                    ):
                        rows.append(case(contestants, policy, kind, workers, (parts[0], parts[1]), options))
        finally:
            for each in contestants:
                each.stop()
    results = {"processors": multiprocessing.cpu_count(), "cases": rows, "resources": counts}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "torchrl.json").write_text(json.dumps(results, indent=1))
    (options.out / "torchrl.md").write_text(report.markdown(rows, counts))
    checksums = [result for row in rows for result in row["checksums"].values()]
    if any(result not in ("ok", "hung", "failed") for result in checksums):
        raise SystemExit("a checksum is wrong")
