"""Timing, percentiles and worker processes, for every benchmark of this folder."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from common.row import NO_BYTES, OK, Row, times

CONTEXT = multiprocessing.get_context("fork")  # cheap to start; every child makes its own Subscriber
_seconds = math.inf  # of a row


def limit(seconds: float) -> None:
    """From here on a row makes as many rounds as fit into this time, and some however long they take."""
    global _seconds
    _seconds = seconds


def rounds(most: int, fewest: int = 3) -> Iterator[int]:
    """Count until `most`, or until the time of a row is over."""
    end = time.monotonic() + _seconds
    for number in range(most):
        if number >= fewest and time.monotonic() >= end:
            return
        yield number


def percentiles(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def rate(turns: Iterable[float]) -> tuple[float, float]:
    """The median turn and the slowest."""
    found = list(turns)
    return statistics.median(found), min(found)


def timed(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


@contextmanager
def processes(
    target: Callable[..., None], arguments: Iterable[tuple[Any, ...]], context: Any = CONTEXT
) -> Iterator[list[Any]]:
    """Run the target in a process for each tuple of arguments. At the end all must exit with status 0."""
    started = [context.Process(target=target, args=each, daemon=True) for each in arguments]
    for process in started:
        process.start()
    yield started
    for process in started:
        process.join()
        assert process.exitcode == 0, "checksum"


def row(what: str, ours: list[float], floor: list[float] | None = None, aim: str = "", check: str = OK) -> Row:
    """A row from seconds. After " / " `what` names the floor."""
    name, _, beside = what.partition(" / ")
    theirs = None if floor is None else times(percentiles(floor))
    return Row(name, times(percentiles(ours)), beside, theirs, aim, check)


def side_by_side(what: str, ours: Callable[[], object], floor: Callable[[], object], most: int, aim: str) -> Row:
    """Alternate the two, so that a slow moment of the machine hits both."""
    for _ in range(3):
        ours(), floor()
    pairs = [(timed(ours), timed(floor)) for _ in rounds(most)]
    return row(what, [a for a, _ in pairs], [b for _, b in pairs], aim)


Loop = Callable[[int], None]  # makes that many calls


def per_call(what: str, loop: Loop, aim: str, floor: Loop | None = None, calls: int = 20000) -> Row:
    """The cost of one call, from batches; the loop around it is measured too and taken off."""

    def empty(n: int) -> None:
        for _ in range(n):
            pass

    def cost(fn: Loop) -> float:
        return max(0.0, timed(lambda: fn(calls)) - overhead) / calls

    loop(1000)
    overhead = min(timed(lambda: empty(calls)) for _ in range(5))
    pairs = [(cost(loop), cost(floor or empty)) for _ in rounds(15)]
    theirs = [floor_cost for _, floor_cost in pairs] if floor else None
    return row(what, [ours for ours, _ in pairs], theirs, aim, NO_BYTES)
