"""MultiprocessCollector beside TorchRL's collectors, with an update of the weights after every batch."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from typing import Any

from clock import Clock
from row import MISSING, OK, Row

import collectors

SCHEME = "SharedMemWeightSyncScheme"


def rows(clock: Clock) -> Iterator[Row]:
    found = importlib.util.find_spec("torchrl") is not None
    if not found:
        yield Row("TorchRL's collectors", trouble=f"{MISSING}: torchrl")
    for sync in clock.cells(["sync", "async"], cost=15):
        frames = 4000 if clock.left > 10 else 1200
        options = argparse.Namespace(workers=4, batch=400, frames=frames)
        ours, theirs = [], []
        while not ours or (clock.left > 15 and len(ours) < 3):
            ours.append(collectors.run(collectors.ours, options, sync == "sync"))
            if found:
                theirs.append(collectors.run(collectors.torchrls, options, sync == "sync", SCHEME))
        yield from pair_of_rows(sync, ours, theirs)
    for sync in clock.over:
        yield clock.left_out(f"the {sync} collector")


def pair_of_rows(sync: str, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> Iterator[Row]:
    peer = f"TorchRL Multi{sync.title()}Collector"
    wrong = {key: int(sum(each[key] for each in ours)) for key in ("torn", "wrong_version")}
    check = OK if not any(wrong.values()) else f"WRONG: {wrong}"
    speeds = [_speeds(each) for each in (ours, theirs)]
    yield Row(f"frames, CartPole, 4 workers, {sync}, weights after every batch", speeds[0], peer, speeds[1], ">= 1 x",
              check, unit="/s")  # fmt: skip
    updates = [_updates(each) for each in (ours, theirs)]
    yield Row(f"update of the weights, CartPole, 4 workers, {sync}", updates[0], peer, updates[1], "1 x", check)


def _speeds(found: list[dict[str, float]]) -> Any:
    """The median pass and the slowest."""
    speeds = sorted(each["frames_per_s"] for each in found)
    return (speeds[len(speeds) // 2], speeds[0]) if speeds else None


def _updates(found: list[dict[str, float]]) -> Any:
    if not found:
        return None
    middle = sorted(found, key=lambda each: each["sync_p50_us"])[len(found) // 2]
    return middle["sync_p50_us"], max(each["sync_p99_us"] for each in found)
