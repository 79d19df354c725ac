"""The time that a section of the table has."""

from __future__ import annotations

import time
from collections.abc import Iterator

import measure
from row import LEFT_OUT, Row


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

    def cells(self, wanted: list[str], cost: float) -> Iterator[str]:
        """Those that there is time for, if each takes `cost` seconds, and always the first."""
        self.over: list[str] = []
        for number, each in enumerate(wanted):
            if number and self.left < cost:
                self.over.append(each)
            else:
                yield each

    def left_out(self, what: str) -> Row:
        return Row(what, trouble=f"{LEFT_OUT}: the {self.seconds:.0f} s of this section are over")
