"""ShmWeightSyncScheme beside TorchRL's SharedMemWeightSyncScheme in TorchRL's collectors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torchrl_collectors as bench
from clock import Clock
from row import FAILED, OK, Pair, Row
from torchrl_report import OURS, THEIRS

IDLE = {"CartPole, 5k": "0.2 x", "200 tensors": "0.05 x"}  # the aims of an update, by how its policy begins


def rows(clock: Clock) -> Iterator[Row]:
    wanted = {
        f"{case.policy}, {case.collector}, {workers} workers": (case, workers)
        for workers in (4, 2, 8)
        for case in bench.CASES
        if case.quick and (workers == 4 or case.collect)
    }
    with bench.trainers([OURS, THEIRS], patience=max(120.0, clock.left)) as contestants:
        for name in clock.cells(list(wanted), cost=12):
            case, workers = wanted[name]
            seconds = min(1.6, clock.left / 20)
            options = argparse.Namespace(seconds=seconds, rounds=3 if clock.left > 20 else 1, quick=True)
            yield from cell(bench.run(case, contestants, workers, options))
        for name in clock.over:
            yield clock.left_out(name)


def cell(found: dict[str, Any]) -> Iterator[Row]:
    check = check_of(found["checksums"])
    for part in found["idle"]:
        what = f"update, {part['policy']}, {part['weights']} weights, {part['workers']} idle workers"
        pairs = [(each["p50_us"], each["p99_us"]) for each in map(part["contestants"].get, (OURS, THEIRS))]
        aim = next((aim for begin, aim in IDLE.items() if part["policy"].startswith(begin)), "")
        yield row(what, pairs, aim, check, "us")
    for part in found["collect"]:
        updates = "no update" if part["weights"] == "none" else f"an update {part['sync']}"
        what = f"frames, {part['policy']}, {updates}, {part['workers']} workers"
        pairs = [speed(part["contestants"].get(name)) for name in (OURS, THEIRS)]
        wrong = part["contestants"].get(OURS, {})
        seen = f"WRONG: {wrong['torn']} torn, {wrong['wrong_version']} of another version" if wrong and (
            wrong["torn"] or wrong["wrong_version"]) else check  # fmt: skip
        yield row(what, pairs, ">= 1 x", seen, "/s")


def row(what: str, pairs: list[Any], aim: str, check: str, unit: str) -> Row:
    ours, theirs = (pair if pair and None not in pair else None for pair in pairs)
    if ours is None:
        return Row(what, floor=THEIRS, aim=aim, trouble=f"{FAILED}: {check.removeprefix('WRONG: ')}")
    return Row(what, ours, THEIRS, theirs, aim, check, unit=unit)


def speed(found: dict[str, Any] | None) -> Pair | None:
    """The median turn and the slowest."""
    return found and (found["frames_per_s"], min(found["turns"]))  # type: ignore[return-value]


def check_of(checksums: dict[str, str]) -> str:
    if checksums[OURS] != "ok":
        return f"WRONG: {checksums[OURS]}"
    return OK if checksums[THEIRS] == "ok" else f"ours ok; {THEIRS}: {checksums[THEIRS]}"
