"""MultiprocessCollector beside Gymnasium's own loops and vector environments."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import vector_envs
from clock import Clock
from row import OK, Row


def rows(clock: Clock) -> Iterator[Row]:
    wanted = list(vector_envs.rows(quick=True))
    for name in clock.cells(wanted, cost=6):
        found = vector_envs.speeds(name, 3 if clock.left > 10 else 1, quick=True)
        what, _, peer = name.partition(" / ")
        ours, theirs = ((statistics.median(each), min(each)) for each in zip(*found, strict=True))
        # Actions are computed again from the recorded observations in each turn; another one ends the section.
        yield Row(f"frames, {what}", ours, peer, theirs, aim(name), OK, unit="/s")
    for name in clock.over:
        yield clock.left_out(name.partition(" / ")[0])


def aim(name: str) -> str:
    if "a loop over 1" in name:
        return ">= 0.95 x"
    return ">= 1.2 x" if "SyncVectorEnv" in name and "AsyncVectorEnv" not in name else ">= 1 x"
