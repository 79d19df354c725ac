"""The fit of growth.py: fixed cost + bytes / bandwidth + workers x cost. Its curves are in growth-*.png."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import growth
import numpy
from common.clock import Clock
from common.environment import installed
from common.row import MISSING, OK, Row


def rows(clock: Clock) -> Iterator[Row]:
    if clock.left < 20:  # fewer points, the ends among them
        growth.SIZES, growth.WORKERS, growth.LEAVES = growth.SIZES[::4], growth.WORKERS[::2], growth.LEAVES[::2]
        growth.BOUND = growth.BOUND[::3]
    found = growth.measure_all(clock.left)
    residuals = sorted(max(each, 1 / each) for each in found["residuals"])
    rate, extra = 1e-9 / max(found["for_byte"], 1e-15), found["for_worker"] * 1e6
    yield Row('fit of publish(wait="all"): fixed cost', (found["fixed"] * 1e6,) * 2, check=OK)
    yield Row("the same: bandwidth", (rate, rate), check=OK, unit="GB/s")
    yield Row("the same: each worker", (extra, extra), check=OK)
    off = (float(numpy.median(residuals)), residuals[-1])
    what = "the same: how far points are from it, median / farthest"
    yield Row(what, off, check=f"{len(residuals)} points", unit="x")
    thousand = next(point for point in found["leaves"] if point.amount >= 100)
    first = found["leaves"][0]
    for_leaf = (thousand.p50 - first.p50) / (thousand.amount - first.amount) * 1e9
    yield Row(f"each of {thousand.amount} leaves", (for_leaf, for_leaf), check=OK, unit="ns")
    if not installed("matplotlib"):
        yield Row("the curves, growth-*.png", trouble=f"{MISSING}: matplotlib")
    else:
        growth.save(found, Path(os.environ["BENCH_RESULTS"]))
        yield Row("the curves are in growth-*.png", check="no figure")
