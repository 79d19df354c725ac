"""Timing, percentiles and printing, for every benchmark of this folder."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

CONTEXT = multiprocessing.get_context("fork")  # cheap to start; every child makes its own Subscriber
RESULTS: list[dict[str, Any]] = []
WIDTH = 76
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


def timed(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def side_by_side(row: str, ours: Callable[[], object], floor: Callable[[], object], most: int, limit: str) -> None:
    """Alternate the two, so that a slow moment of the machine hits both."""
    for _ in range(3):
        ours(), floor()
    pairs = [(timed(ours), timed(floor)) for _ in rounds(most)]
    report(row, [a for a, _ in pairs], [b for _, b in pairs], limit)


def report(row: str, ours: list[float], floor: list[float] | None, limit: str) -> None:
    p50, p99 = percentiles(ours)
    result: dict[str, Any] = {"row": row, "p50_us": p50 * 1e6, "p99_us": p99 * 1e6, "limit": limit}
    text = f"{row:{WIDTH}} {p50 * 1e6:11.2f} {p99 * 1e6:11.2f}"
    if floor is not None:
        f50, f99 = percentiles(floor)
        result |= {"floor_p50_us": f50 * 1e6, "floor_p99_us": f99 * 1e6, "ratio_p50": p50 / f50, "ratio_p99": p99 / f99}
        text += f" {f50 * 1e6:11.2f} {p50 / f50:7.2f} {p99 / f99:7.2f}"
    else:
        text += " " * 28
    RESULTS.append(result)
    print(f"{text}   {limit}", flush=True)


Loop = Callable[[int], None]  # makes that many calls


def per_call(row: str, loop: Loop, limit: str, floor: Loop | None = None, calls: int = 20000) -> None:
    """The cost of one call, from batches; the loop around it is measured too and taken off."""

    def empty(n: int) -> None:
        for _ in range(n):
            pass

    def cost(fn: Loop) -> float:
        return max(0.0, timed(lambda: fn(calls)) - overhead) / calls

    loop(1000)
    overhead = min(timed(lambda: empty(calls)) for _ in range(5))
    pairs = [(cost(loop), cost(floor or empty)) for _ in rounds(15)]
    report(row, [ours for ours, _ in pairs], [theirs for _, theirs in pairs] if floor else None, limit)


def markdown() -> str:
    """The results as a table for docs/performance.md."""
    lines = ["| what | shmsync | floor | ratio | at most |", "|---|---|---|---|---|"]
    for result in RESULTS:
        what, _, floor_name = str(result["row"]).partition(" / ")
        cells = [what, _pair(result, "p50_us", "p99_us"), "", "", str(result["limit"])]
        if "floor_p50_us" in result:
            cells[2] = f"{floor_name}: {_pair(result, 'floor_p50_us', 'floor_p99_us')}"
            cells[3] = _pair(result, "ratio_p50", "ratio_p99")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _pair(result: dict[str, Any], first: str, second: str) -> str:
    return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (result[first], result[second]))
