"""Waiting until workers have applied a version, and naming those that have not."""

from __future__ import annotations

import time

from .. import _native
from ..errors import AckTimeout, WorkerDied
from ..memory import reader_table
from ..memory.process import Peers, ProcessState
from ..memory.reader_table import RowId
from .timing import slice_until


def wait_for_acks(
    writer: _native.Writer,
    control: _native.Control,
    peers: Peers,
    version: int,
    workers: list[int] | None,
    deadline: float,
    me: int,
    died: dict[RowId, int | str],
) -> None:
    """Return when all have acked `version`. `workers`: None means the rows claimed now, a list those indices, attached
    or not. Those who leave cleanly meanwhile are dropped, unless they were named and had not acked.

    `died`: rows already reaped in this call, while it waited for their pins.

    Raises WorkerDied as soon as only dead ones are left to wait for, AckTimeout at the deadline.
    """
    rows: list[RowId] = writer.claimed_rows() if workers is None else []
    dead: dict[RowId, int | str] = {
        row: name
        for row, name in died.items()
        if workers is not None and name in workers and not _has_heir(control, peers, row, name)
    }
    while True:
        if workers is not None:
            rows = _late_rows(control, workers, version)
        rows = writer.wait_acks(version, rows, slice_until(deadline))
        for row in [row for row in rows if not peers.alive(row[1])]:
            rows.remove(row)
            # It may have acked between our look and its death.
            if writer.wait_acks(version, [row], 0):
                name = reader_table.name_of(control, row)
                if not _has_heir(control, peers, row, name):
                    dead[row] = name
                control.reap(*row, me)  # the next publish does not wait for it
        absent = [] if workers is None else _absent(control, workers, version, dead)
        if not rows and not absent:
            break
        if time.monotonic() >= deadline:
            raise _late(control, peers, version, rows, absent, list(dead.values()))
        if absent and not rows:
            time.sleep(0.0005)  # a named worker that has not attached yet
    if dead:
        names_of_dead = list(dead.values())
        raise WorkerDied(
            f"version {version} is published, but {reader_table.listed(names_of_dead)} died before applying it; all others "
            'have it. Start them again, or go on without: wait="all" leaves them out, a list must not name them',
            version=version,
            missing=names_of_dead,
        )


def _applied(row: reader_table.Row, version: int) -> bool:
    # Nothing later is published while we wait for this one, so an ack of more is garbage.
    return row.acked == version


def _late_rows(control: _native.Control, workers: list[int], version: int) -> list[RowId]:
    return [row.id for row in reader_table.claimed(control) if row.worker in workers and not _applied(row, version)]


def _absent(control: _native.Control, workers: list[int], version: int, dead: dict[RowId, int | str]) -> list[int]:
    """Named workers of whom no ack is there: not attached yet, late, or gone without one."""
    done = {*control.workers_at(version), *dead.values()}
    return [worker for worker in workers if worker not in done]


def _has_heir(control: _native.Control, peers: Peers, dead: RowId, name: int | str) -> bool:
    """Has a live subscriber taken the dead one's index? Then it acks for it."""
    return any(
        row.worker == name and row.id != dead and peers.alive(row.owner) for row in reader_table.claimed(control)
    )


def _late(
    control: _native.Control,
    peers: Peers,
    version: int,
    rows: list[RowId],
    absent: list[int],
    dead: list[int | str],
) -> AckTimeout:
    late = [reader_table.name_of(control, row) for row in rows]
    gone = [worker for worker in absent if worker not in late]
    late += gone
    stopped = sum(peers.state(owner) is ProcessState.STOPPED for _, owner in rows)
    return AckTimeout(
        f"version {version} is published, but {reader_table.listed(late)} did not apply it in time"
        + (f" ({stopped} of them stopped)" if stopped else "")
        + "; a worker applies at its next read section or refresh()"
        + (f"; not attached: {reader_table.listed(list(gone))}" if gone else "")
        + (f"; dead: {reader_table.listed(dead)}" if dead else ""),
        version=version,
        missing=[*late, *dead],
    )
