"""What measure.py has printed and kept, as rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import measure
from clock import Clock
from row import OK, Row


class Job(NamedTuple):
    """A function of this folder that reports rows, and asserts what it can check before it returns."""

    call: Callable[[], None]
    rows: int
    what: str  # in few words, if it is left out
    check: str = OK
    cost: float = 0.0  # seconds to prepare it


def taken(clock: Clock, jobs: list[Job]) -> Iterator[Row]:
    """The rows of all jobs; a job that has no time left is left out."""
    to_come = sum(job.rows for job in jobs)
    for number, job in enumerate(jobs):
        if number and clock.left <= job.cost:
            yield clock.left_out(job.what)
        else:
            clock.row(to_come)
            measure.RESULTS.clear()
            job.call()
            for result in measure.RESULTS:
                yield row_of(result, job.check)
        to_come -= job.rows


def row_of(result: dict[str, Any], check: str) -> Row:
    what, _, floor = str(result["row"]).partition(" / ")
    theirs = (result["floor_p50_us"], result["floor_p99_us"]) if "floor_p50_us" in result else None
    return Row(what, (result["p50_us"], result["p99_us"]), floor, theirs, str(result["limit"]), check)
