"""The reader table as Python sees it: one row for each subscriber."""

from __future__ import annotations

from typing import NamedTuple

from .. import _native
from .process import pid_of

RowId = tuple[int, int]  # (number, owner): the row while it is this process's


class Row(NamedTuple):
    """One row. `acked` belongs to `worker` or is 0; the other words are each on their own."""

    number: int
    owner: int
    pinned: int  # version; 0: none
    acked: int
    worker: int  # -1: none was given
    pinned_at: int  # CLOCK_MONOTONIC, ns
    reads: int
    torn: int
    retries: int

    @property
    def id(self) -> RowId:
        """The row while it is this process's."""
        return self.number, self.owner


def read(control: _native.Control, number: int) -> Row:
    """One row, claimed or not."""
    return Row(number, *control.row(number))


def claimed(control: _native.Control) -> list[Row]:
    """Every row that somebody owns."""
    rows = ((owner, read(control, number)) for number, owner in control.owners())
    return [row for owner, row in rows if row.owner == owner]


def name_of(control: _native.Control, row: RowId) -> int | str:
    """How an error names a row: its worker index if it has one, else its process."""
    number, owner = row
    found = read(control, number)
    return found.worker if found.owner == owner and found.worker >= 0 else f"pid {pid_of(owner)}"
