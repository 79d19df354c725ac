"""The reader table as Python sees it: one row for each subscriber."""

from __future__ import annotations

import time
from typing import NamedTuple

from .. import _native
from ..engine.stats import ReaderInfo
from .process import Peers, pid_of

RowId = tuple[int, int]  # (number, owner): the row while it is this process's


class Row(NamedTuple):
    """One row. `acked` belongs to `worker` or is 0; the other words are each on their own."""

    number: int
    owner: int
    pin: int  # 0, or the pinned `current` + 1
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


def listed(names: list[int | str]) -> str:
    """The same for several, in a sentence."""
    return ", ".join(f"worker {name}" if isinstance(name, int) else name for name in names)


def infos(control: _native.Control, peers: Peers, version: int) -> list[ReaderInfo]:
    """What Publisher.readers() returns; `version` is the published one."""
    rows = claimed(control)
    peers.keep_only({row.owner for row in rows})
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return [
        ReaderInfo(
            worker=None if row.worker < 0 else row.worker,
            pid=pid_of(row.owner),
            state=peers.state(row.owner),
            acked=row.acked,
            lag=max(0, version - row.acked),
            pinned=(row.pin - 1) >> 8 if row.pin else None,
            pin_age=max(0.0, (now - row.pinned_at) / 1e9) if row.pin else 0.0,
            reads=row.reads,
            torn=row.torn,
            retries=row.retries,
        )
        for row in rows
    ]
