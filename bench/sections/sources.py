"""Sources other than a module, many leaves, parts of the weights: what sources.py measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sources
from clock import Clock
from row import OK, Row

ORDER = {"dict": 10, "carry": 6, "bind": 14, "snapshot": 4, "filter": 2, "small": 5}  # and how many rows each has


def rows(clock: Clock) -> Iterator[Row]:
    sources.LEAVES = (1000, 4000)
    to_come = sum(ORDER.values())
    for number, (name, count) in enumerate(ORDER.items()):
        if number and clock.left <= 0:
            yield clock.left_out(f"rows of sources.py: {name}")
        else:
            clock.row(to_come)
            sources.RESULTS.clear()
            sources.ROWS[name]()
            yield from map(row_of, sources.RESULTS)
        to_come -= count


def row_of(result: dict[str, Any]) -> Row:
    what, _, floor = result["work"].partition(" / ")
    each = ", for each leaf" if result["unit"] == "us a leaf" else ""
    theirs = (result["floor_us"], result["floor_p99_us"]) if result["floor_us"] else None
    ours = (result["ours_us"], result["ours_p99_us"])
    return Row(what + each, ours, floor, theirs, result["aim"], OK)
