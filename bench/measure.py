"""Timing, percentiles and printing, for every benchmark of this folder."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable

CONTEXT = multiprocessing.get_context("fork")  # cheap to start; every child makes its own Subscriber
RESULTS: list[dict[str, object]] = []
WIDTH = 76


def percentiles(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def timed(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def side_by_side(row: str, ours: Callable[[], object], floor: Callable[[], object], rounds: int, limit: str) -> None:
    """Alternate the two, so that a slow moment of the machine hits both."""
    for _ in range(3):
        ours(), floor()
    pairs = [(timed(ours), timed(floor)) for _ in range(rounds)]
    report(row, [a for a, _ in pairs], [b for _, b in pairs], limit)


def report(row: str, ours: list[float], floor: list[float] | None, limit: str) -> None:
    p50, p99 = percentiles(ours)
    result: dict[str, object] = {"row": row, "p50_us": p50 * 1e6, "p99_us": p99 * 1e6, "limit": limit}
    text = f"{row:{WIDTH}} {p50 * 1e6:11.2f} {p99 * 1e6:11.2f}"
    if floor is not None:
        f50, f99 = percentiles(floor)
        result |= {"floor_p50_us": f50 * 1e6, "floor_p99_us": f99 * 1e6, "ratio_p50": p50 / f50, "ratio_p99": p99 / f99}
        text += f" {f50 * 1e6:11.2f} {p50 / f50:7.2f} {p99 / f99:7.2f}"
    else:
        text += " " * 28
    RESULTS.append(result)
    print(f"{text}   {limit}", flush=True)


def per_call(row: str, fn: Callable[[int], None], limit: str, calls: int = 20000) -> None:
    """The cost of one call, from batches; the loop around it is measured too and taken off."""

    def empty(n: int) -> None:
        for _ in range(n):
            pass

    fn(1000)
    loop = min(timed(lambda: empty(calls)) for _ in range(5))
    report(row, [max(0.0, timed(lambda: fn(calls)) - loop) / calls for _ in range(15)], None, limit)
