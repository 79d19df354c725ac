"""The time that a section of the table has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from common import measure
from common.row import LEFT_OUT, Row


class Job(NamedTuple):
    """A function that measures rows, and asserts what it can check before it ends."""

    call: Callable[[], Iterable[Row]]
    rows: int
    what: str  # in few words, if it is left out
    cost: float = 0.0  # seconds to prepare it


class Clock:
    """Counts from when the section began."""

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds - spent

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def row(self, rows: int) -> None:
        """Rows that measure.py makes have an equal part of what is left, if so many are to come."""
        measure.limit(self.left / max(1, rows))

    def rows(self, jobs: list[Job]) -> Iterator[Row]:
        """The rows of all jobs; a job that has no time left is left out, but never the first."""
        to_come = sum(job.rows for job in jobs)
        for number, job in enumerate(jobs):
            if number and self.left <= job.cost:
                yield self.left_out(job.what)
            else:
                self.row(to_come)
                yield from list(job.call())  # all of them: its checks come after its rows
            to_come -= job.rows

    def cells(
        self, wanted: dict[str, tuple[Any, ...]], cost: float, measure: Callable[..., Iterable[Row]]
    ) -> Iterator[Row]:
        """The rows of those that there is time for, if each takes `cost` seconds, and always of the first."""
        over = []
        for number, (name, arguments) in enumerate(wanted.items()):
            if number and self.left < cost:
                over.append(name)
            else:
                yield from measure(*arguments)
        yield from map(self.left_out, over)

    def left_out(self, what: str) -> Row:
        return Row(what, trouble=f"{LEFT_OUT}: the {self.seconds:.0f} s of this section are over")
