"""What a scheme costs and keeps in real collectors of TorchRL: updates, frames per second, torn frames, files, threads.

    python bench/torchrl.py                      every policy, with 2, 4 and 8 workers: half an hour
    python bench/torchrl.py --quick              4 workers, shmsync and TorchRL's SharedMem only, less than two minutes
    python bench/torchrl.py --contestants shmsync SharedMem --workers 2
    python bench/torchrl.py --out DIR            where torchrl.json and torchrl.md go (default ./bench-results)

The contestants are schemes, each in its own trainer process, with the same policy, environment (CartPole-v1) and
workers (spawned, as TorchRL does). They take turns in one run, and are stopped between their turns. Only ratios mean
anything.

idle        update_policy_weights_() in a loop, from the call until every worker has the weights; all values change.
every batch an update between two batches of a MultiSyncCollector.
every 10 ms an update of a MultiAsyncCollector which fills a replay buffer (start()), from the trainer's main thread.

The weights are the "own" of the collector's policy, changed in place, or those of a separate "learner", given as a
TensorDict. On the CPU TorchRL makes the own policy's parameters shared memory: there its update copies nothing, and
workers see every write at once.  "none" is the collector without any update.

torn        frames whose policy call saw weights change, or half written.
version     frames whose ("next", "policy_version"), and whose root "policy_version", is not that of their weights.
stall       how much longer than the median a policy call took, on average, for each frame. Mostly that is the machine's
            own unrest: compare it with the row without updates.
updates     those that take more than 10 ms are less than 100 a second, which leaves more time for frames.
trainer     files and threads beyond those before the collector was made; left: after its shutdown.

After each case checksums prove that every worker has the weights of the last update.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common import page
from common.environment import environment
from common.row import Row
from common.trainer import Trainer, why

from torchrl_scheme import rows
from torchrl_scheme.rows import LEARNER, NONE, OURS, OWN, THEIRS

SHMSYNC = "shmsync.integrations.torchrl:ShmWeightSyncScheme"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: (SHMSYNC, {"timeout": 30.0}),
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


class Contestant(Trainer):
    """A trainer process, and with it the workers of its collector."""

    def __init__(self, name: str, patience: float) -> None:
        from torchrl_scheme import trainer

        self.name = name
        self.patience = patience
        super().__init__(CONTEXT, trainer.main, *CONTESTANTS[name])

    def ask(self, command: str, *arguments: Any) -> Any:
        """The answer; None when the contestant is in trouble, perhaps since this command.

        TorchRL's schemes wait forever for a dead worker.
        """
        self.tell(command, *arguments)
        return self.receive()

    def tell(self, command: str, *arguments: Any) -> None:
        if self.trouble is None:
            self._signal(signal.SIGCONT)
            self.send((command, *arguments))

    def receive(self) -> Any:
        """The answer, as from ask()."""
        if self.trouble is not None:
            return None
        try:
            return self.answer(self.patience)
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            self.trouble = why(error)
            print(f"{self.name}: {error!s}", flush=True)
            self.stop(5.0)
            return None

    def turn(self, command: str, *arguments: Any) -> Any:
        """As ask(), and stopped afterwards."""
        answer = self.ask(command, *arguments)
        if self.trouble is None:
            self._signal(signal.SIGSTOP)
        return answer

    def stop(self, patience: float = 20.0) -> None:
        """With its workers."""
        self._signal(signal.SIGCONT)
        try:
            super().stop(patience)
        finally:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Signal every process in its group, which exists from the first answer on."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass


def ask_all(contestants: list[Contestant], command: str, *arguments: Any) -> dict[str, Any]:
    """Ask all contestants at the same time: nothing is timed here."""
    for each in contestants:
        each.tell(command, *arguments)
    return {each.name: each.receive() for each in contestants}


def close_all(contestants: list[Contestant]) -> None:
    """Close all; a contestant in trouble gets a new process."""
    ask_all(contestants, "close")
    again = [each for each in contestants if each.trouble is not None]
    for each in again:
        each.start()
    for each in again:
        each.answer(each.patience)


def resources(contestants: list[Contestant]) -> Iterator[Row]:
    """Files and threads, with one tensor and with many; in processes that have done nothing else yet."""
    for policy in ("1 tensor", "600 tensors"):
        before = ask_all(contestants, "count")
        ask_all(contestants, "open", policy, "sync", 1, FRAMES)
        ask_all(contestants, "idle", OWN, 0.0)
        during = ask_all(contestants, "count")
        troubles = {each.name: each.trouble for each in contestants}
        close_all(contestants)
        after = ask_all(contestants, "count")
        counts: dict[str, Any] = {}
        for name, first in before.items():
            counts[name] = None
            if troubles[name] is None and after[name] is not None:
                counts[name] = {"worker": during[name]["worker"]}
                for where, found in (("trainer", during), ("left", after)):
                    counts[name][where] = {key: found[name]["trainer"][key] - n for key, n in first["trainer"].items()}
        yield from rows.resources(policy, counts)


class Turns(NamedTuple):
    seconds: float  # of a row with idle workers, and of four turns of collecting
    rounds: int  # of collecting
    whose: tuple[str, ...] = (NONE, LEARNER)  # weights, when collecting
    details: bool = False


def run(case: Case, workers: int, contestants: list[Contestant], turns: Turns) -> Iterator[Row]:
    """All turns with one policy and one kind of collector; the rows come after the checksums."""
    for each in contestants:
        each.turn("open", case.policy, case.collector, workers, FRAMES)
    idle, collected = {}, {}
    for whose in (OWN, LEARNER) if case.idle else ():
        samples: dict[str, list[float]] = {each.name: [] for each in contestants}
        idle[whose] = samples
        end = time.monotonic() + turns.seconds
        while True:
            for each in contestants:
                samples[each.name] += each.turn("idle", whose, TURN) or []
            if time.monotonic() >= end:
                break
    for whose in turns.whose if case.collect else ():
        collected[whose] = {each.name: [] for each in contestants}
        for number in range(turns.rounds):
            for each in contestants if number % 2 == 0 else reversed(contestants):  # none is always the first
                collected[whose][each.name].append(each.turn("collect", whose, turns.seconds / 4))
    answers = ask_all(contestants, "check")
    checks = {each.name: each.trouble or answers[each.name] for each in contestants}
    close_all(contestants)
    for whose, samples in idle.items():
        yield from rows.idle(case.policy, workers, whose, samples, checks)
    for whose, found in collected.items():
        yield from rows.collect(case.policy, case.collector, workers, whose, found, checks, turns.details)


@contextmanager
def trainers(names: list[str], patience: float) -> Iterator[list[Contestant]]:
    """The contestants with these names, which end with it."""
    contestants: list[Contestant] = []
    with environment():
        try:
            contestants += [Contestant(name, patience) for name in names]
            for each in contestants:
                each.answer(patience)
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
    page.show(all_rows(names, options), options.out / "torchrl")


def all_rows(names: list[str], options: argparse.Namespace) -> Iterator[Row]:
    whose = (NONE, LEARNER) if options.quick else (NONE, LEARNER, OWN)
    turns = Turns(options.seconds, options.rounds, whose, details=True)
    with trainers(names, options.patience) as contestants:
        yield from resources(contestants)
        for workers in options.workers or ([4] if options.quick else [2, 4, 8]):
            for case in CASES:
                if any(part in case.policy for part in options.cases) and (case.quick or not options.quick):
                    yield from run(case, workers, contestants, turns)
