"""The reader table as Python sees it: one row for each subscriber."""

from __future__ import annotations

from typing import NamedTuple

from ... import _native
from ..system.process import Peers, pid_of

RowId = tuple[int, int]  # (number, owner): a row, for as long as it has this owner


class Row(NamedTuple):
    """One row. `acked` is that of `worker`, or 0. The other words may each be from another moment."""

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
        """Stands for the row for as long as it has this owner."""
        return self.number, self.owner


def read(control: _native.Control, number: int) -> Row:
    """One row, claimed or not."""
    return Row(number, *control.row(number))


def claimed(control: _native.Control) -> list[Row]:
    """Every row that has an owner."""
    rows = ((owner, read(control, number)) for number, owner in control.owners())
    return [row for owner, row in rows if row.owner == owner]


def forget(control: _native.Control, worker: int, peers: Peers, me: int) -> None:
    """Take this index off the rows of processes that are gone. `me`: the calling process."""
    for number, owner in control.rows_of(worker):
        if owner and (peers.alive(owner) or not control.reap(number, owner, me)):
            continue
        control.forget(number, me)


def name_of(control: _native.Control, row: RowId) -> int | str:
    """How an error names a row: its worker index if it has one, else its process."""
    number, owner = row
    found = read(control, number)
    return found.worker if found.owner == owner and found.worker >= 0 else f"pid {pid_of(owner)}"
