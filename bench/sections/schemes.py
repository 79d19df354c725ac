"""A synchronous send of shmsync's schemes beside a ping-pong with a memcpy, and beside TorchRL's schemes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import schemes
from clock import Clock
from row import FAILED, MISSING, OK, Row
from schemes import ALIAS, BARE, FLOOR, OURS, PIPE, QUEUES, RAY, TORCHRL, TORCHRL_PIPE

SMALL, MANY, LARGE = "5k parameters, 6 tensors", "5k parameters, 200 tensors", "25M parameters, 6 tensors"
CELLS = [  # the most telling first: the time may not be enough for all
    *((size, 4) for size in (MANY, LARGE, SMALL, "1M parameters, 6 tensors", "1.6 MB, 200 tensors")),
    (MANY, 1), (SMALL, 8), (MANY, 8), (LARGE, 1), (SMALL, 1), (SMALL, 2), (LARGE, 8), (MANY, 2),
]  # fmt: skip


def rows(clock: Clock) -> Iterator[Row]:
    names = [FLOOR, OURS, PIPE, BARE, ALIAS]
    if importlib.util.find_spec("torchrl") is None:
        yield Row("TorchRL's schemes", trouble=f"{MISSING}: torchrl")
    else:
        names += [TORCHRL, TORCHRL_PIPE, QUEUES]
    if importlib.util.find_spec("ray") is not None:
        names.append(RAY)
    with schemes.contestants_of(names, patience=max(120.0, clock.left)) as contestants:
        wanted = {place(size, workers): (size, workers) for size, workers in CELLS}
        for name in clock.cells(list(wanted), cost=8):
            size, workers = wanted[name]
            seconds = min(4.0, clock.left / len(wanted) / 2)
            # Queues and Ray's store take part in the first cell only: it is the README's chart.
            invited = [each for each in contestants if each.name not in (QUEUES, RAY) or (size, workers) == CELLS[0]]
            yield from cell(schemes.measure(invited, size, workers, seconds))
        for name in clock.over:
            yield clock.left_out(f"send, {name}")


def cell(found: dict[str, Any]) -> Iterator[Row]:
    size, workers, results = found["size"], found["workers"], found["contestants"]
    aim = "3 x" if "200" in size else "2 x"
    for ours, theirs, most in (
        (OURS, FLOOR, aim), (ALIAS, BARE, aim), (OURS, TORCHRL, "1 x"), (PIPE, TORCHRL_PIPE, "1 x"),
        (OURS, QUEUES, "1 x"), (OURS, RAY, "1 x"),
    ):  # fmt: skip
        if theirs not in results:
            continue
        what = f"{ours.removeprefix('shmsync ')}, {place(size, workers)}"
        yield beside(what, results[ours], theirs, results[theirs], most)


def place(size: str, workers: int) -> str:
    return f"{size}, {workers} worker{'s' if workers > 1 else ''}"


def beside(what: str, ours: dict[str, Any], name: str, theirs: dict[str, Any], aim: str) -> Row:
    if "trouble" in ours:
        return Row(what, floor=name, aim=aim, trouble=f"{FAILED}: {ours['trouble']}")
    if "trouble" in theirs:  # a peer's own
        return Row(what, pair(ours), f"{name}: {theirs['trouble']}", None, aim, check(ours))
    return Row(what, pair(ours), name, pair(theirs), aim, check(ours, theirs))


def pair(found: dict[str, Any]) -> tuple[float, float]:
    return found["p50_us"], found["p99_us"]


def check(*found: dict[str, Any]) -> str:
    wrong = [each["checksum"] for each in found if each["checksum"] != "ok"]
    return f"WRONG: {'; '.join(wrong)}" if wrong else OK
