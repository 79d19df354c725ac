"""What a scheme costs and keeps in real collectors of TorchRL: updates, frames per second, torn frames, files, threads.

    python bench/torchrl.py                      every policy, with 2, 4 and 8 workers: half an hour
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
updates/s   an update that takes more than 10 ms makes them less than 100, which leaves more time for frames.
trainer     files and threads beyond those before the collector was made; left: after its shutdown.

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
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torchrl_report as report
from torchrl_report import ALIAS, LEARNER, NONE, OURS, OWN, THEIRS, Row

SHMSYNC = "shmsync.integrations.torchrl:ShmWeightSyncScheme"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: (SHMSYNC, {"timeout": 30.0}),
    ALIAS: (SHMSYNC, {"timeout": 30.0, "alias": True}),
    "shmsync, 2 slots": (SHMSYNC, {"timeout": 30.0, "slots": 2}),
    THEIRS: ("torchrl.weight_update:SharedMemWeightSyncScheme", {}),
    "TorchRL MultiProcess": ("torchrl.weight_update:MultiProcessWeightSyncScheme", {}),
}
CONTEXT = multiprocessing.get_context("spawn")


class Case(NamedTuple):
    policy: str
    collector: str  # "sync" or "async"
    idle: bool  # measure updates with idle workers
    collect: bool  # measure frames
    quick: bool = True


CASES = [
    Case("CartPole, 5k parameters", "sync", idle=True, collect=False),
    Case("200 tensors, 1.6 MB", "sync", idle=True, collect=False),
    Case("CartPole, 5k + 100k parameters", "sync", idle=False, collect=True, quick=False),
    Case("CartPole, 5k + 100k parameters", "async", idle=False, collect=True),
    Case("vision, 5M parameters", "sync", idle=True, collect=True),
    Case("vision, 5M parameters", "async", idle=False, collect=True, quick=False),
]
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
        self.send(command, *arguments)
        return self.receive()

    def send(self, command: str, *arguments: Any) -> None:
        if self.trouble is None:
            self._signal(signal.SIGCONT)
            self._conn.send((command, *arguments))

    def receive(self) -> Any:
        """The answer, as from ask()."""
        if self.trouble is not None:
            return None
        try:
            return self.answer()
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            self.trouble = "hung" if isinstance(error, TimeoutError) else "failed"
            print(f"{self.name}: {error!s}", flush=True)
            self.stop(5.0)
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

    def stop(self, patience: float = 20.0) -> None:
        """The trainer may end by itself first, which leaves nothing behind; idempotent."""
        self._signal(signal.SIGCONT)
        self._conn.close()
        self._process.join(patience)
        self._signal(signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _signal(self, number: int) -> None:
        """To everybody in its process group, which is there from the first answer on."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


def ask_all(contestants: list[Contestant], command: str, *arguments: Any) -> dict[str, Any]:
    """At the same time: nothing is timed here."""
    for each in contestants:
        each.send(command, *arguments)
    return {each.name: each.receive() for each in contestants}


def close_all(contestants: list[Contestant]) -> None:
    """Who is in trouble gets a new process."""
    ask_all(contestants, "close")
    again = [each for each in contestants if each.trouble is not None]
    for each in again:
        each.start()
    for each in again:
        each.answer()


def resources(contestants: list[Contestant]) -> list[Row]:
    """Files and threads, with one tensor and with many; in processes that have done nothing else yet."""
    rows: list[Row] = []
    for policy in ("1 tensor", "600 tensors"):
        before = ask_all(contestants, "count")
        ask_all(contestants, "open", policy, "sync", 1, FRAMES)
        ask_all(contestants, "idle", OWN, 0.0)
        during = ask_all(contestants, "count")
        troubles = {each.name: each.trouble for each in contestants}
        close_all(contestants)
        after = ask_all(contestants, "count")
        for name, trouble in troubles.items():
            rows.append(report.resources(policy, name, trouble, before[name], during[name], after[name]))
            report.show_resources(rows[-1])
    return rows


def run(case: Case, contestants: list[Contestant], workers: int, options: argparse.Namespace) -> Row:
    """Everybody's turns with one policy and one kind of collector."""
    for each in contestants:
        each.turn("open", case.policy, case.collector, workers, FRAMES)
    row: Row = {"policy": case.policy, "collector": case.collector, "workers": workers, "idle": [], "collect": []}
    for whose in (OWN, LEARNER) if case.idle else ():
        samples: dict[str, list[float]] = {each.name: [] for each in contestants}
        end = time.monotonic() + options.seconds
        while True:
            for each in contestants:
                samples[each.name] += each.turn("idle", whose, TURN) or []
            if time.monotonic() >= end:
                break
        row["idle"].append(report.idle(case.policy, workers, whose, samples))
        report.show_idle(row["idle"][-1])
    for whose in ((NONE, LEARNER) if options.quick else (NONE, LEARNER, OWN)) if case.collect else ():
        turns: dict[str, list[Row]] = {each.name: [] for each in contestants}
        for number in range(options.rounds):
            for each in contestants if number % 2 == 0 else reversed(contestants):  # nobody is always the first
                turns[each.name].append(each.turn("collect", whose, options.seconds / 4))
        row["collect"].append(report.collect(case.policy, case.collector, workers, whose, turns))
        report.show_collect(row["collect"][-1])
    checksums = ask_all(contestants, "check")
    row["checksums"] = {each.name: each.trouble or checksums[each.name] for each in contestants}
    close_all(contestants)
    wrong = {name: result for name, result in row["checksums"].items() if result != "ok"}
    print(f"  checksums: {wrong or 'ok'}", flush=True)
    return row


@contextmanager
def trainers(names: list[str], patience: float) -> Iterator[list[Contestant]]:
    """The contestants with these names, which end with it."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    os.environ |= {"PYTHONWARNINGS": "ignore", "RL_WARNINGS": "0", "RL_LOGGING_LEVEL": "WARNING"}
    contestants: list[Contestant] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # TorchRL leaves a folder for each replay buffer
        try:
            contestants += [Contestant(name, patience) for name in names]
            for each in contestants:
                each.answer()
            yield contestants
        finally:
            for each in contestants:
                each.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 workers, two contestants, few turns")
    parser.add_argument("--workers", nargs="*", type=int, help="default: 2 4 8")
    parser.add_argument("--rounds", type=int, help="turns of collecting; default: 6, quick 5")
    parser.add_argument("--seconds", type=float, help="of a row with idle workers, and of four turns of collecting")
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of the policies' names; default: all")
    parser.add_argument("--contestants", nargs="*", help="parts of their names; default: all")
    parser.add_argument("--patience", type=float, default=60, help="seconds until a contestant counts as hung")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 6)
    options.seconds = options.seconds or (1.6 if options.quick else 4.0)
    names = [OURS, THEIRS] if options.quick else list(CONTESTANTS)
    if options.contestants:
        names = [name for name in CONTESTANTS if any(part in name for part in options.contestants)]
    print(f"{multiprocessing.cpu_count()} processors, one thread to compute in each process", flush=True)
    rows: list[Row] = []
    with trainers(names, options.patience) as contestants:
        counts = resources(contestants)
        for workers in options.workers or ([4] if options.quick else [2, 4, 8]):
            for case in CASES:
                if any(part in case.policy for part in options.cases) and (case.quick or not options.quick):
                    rows.append(run(case, contestants, workers, options))
    results = {"processors": multiprocessing.cpu_count(), "cases": rows, "resources": counts}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "torchrl.json").write_text(json.dumps(results, indent=1))
    (options.out / "torchrl.md").write_text(report.markdown(rows, counts))
    checksums = [result for row in rows for result in row["checksums"].values()]
    if any(result not in ("ok", "hung", "failed") for result in checksums):
        raise SystemExit("a checksum is wrong")
