"""ShmWeightSyncScheme beside TorchRL's SharedMemWeightSyncScheme in TorchRL's collectors."""

from __future__ import annotations

from collections.abc import Iterator

from common.clock import Clock
from common.row import Row

from torchrl_scheme import contest
from torchrl_scheme.rows import OURS, THEIRS


def rows(clock: Clock) -> Iterator[Row]:
    wanted = {
        f"{case.policy}, {case.collector}, {workers} workers": (case, workers)
        for workers in (4, 2, 8)
        for case in contest.CASES
        if case.quick and (workers == 4 or case.collect)
    }
    with contest.trainers([OURS, THEIRS], patience=max(120.0, clock.left)) as contestants:

        def measure(case: contest.Case, workers: int) -> Iterator[Row]:
            turns = contest.Turns(min(1.6, clock.left / 20), rounds=3 if clock.left > 20 else 1)
            return contest.run(case, workers, contestants, turns)

        yield from clock.cells(wanted, 12, measure)
