"""Waiting until workers have applied a version, and naming those that have not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ... import _native
from ...errors import AckTimeout, ClosedError
from ...memory.control import reader_table
from ...memory.control.reader_table import RowId
from ...memory.system.process import Peers, ProcessState
from ..deadlines import slice_until
from ..outcome import Outcome, Wording, listed, name_with_pid

_WORDING = Wording(
    "a worker applies at its next read section or refresh()",
    sent="is published",
    after_death='The others have it. Start the dead again, or go on without them: wait="all" leaves them out, a list '
    "must not name them",
    after_lateness="A worker that is merely late still applies it; give more time with timeout=",
)


class Acks(NamedTuple):
    """Whose acks a call waits for."""

    wanted: bool
    workers: list[int] | None = None  # their indices; None: all workers


NO_ACKS = Acks(False)


def wait_for_acks(
    writer: _native.Writer,
    control: _native.Control,
    peers: Peers,
    version: int,
    workers: list[int] | None,
    deadline: float,
    me: int,
    died: dict[RowId, int | str],
    ending: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the workers have acked `version`; None: those attached now, a list: these indices, attached or not.

    A worker that leaves meanwhile is not waited for, unless it was named and had not acked. `died` has the rows that
    this call has reaped already, while it waited for their pins. `ending` says when the arena is about to be closed.

    Raises WorkerDied as soon as only dead ones are left to wait for, AckTimeout at the deadline, ClosedError.
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
            # It may have acked after we looked, and then died.
            if writer.wait_acks(version, [row], 0):
                name = reader_table.name_of(control, row)
                if not _has_heir(control, peers, row, name):
                    dead[row] = name
                control.reap(*row, me)  # the next publish does not wait for it
        absent = [] if workers is None else _absent(control, workers, version, dead)
        if not rows and not absent:
            break
        if ending():
            raise _closed(control, version, rows, absent)
        if time.monotonic() >= deadline:
            raise _late(control, peers, version, rows, absent, list(dead.values()))
        if absent and not rows:
            time.sleep(0.0005)  # a named worker that has not attached yet
    if dead:
        raise _outcome(list(dead.values())).death(f"version {version}", version)


def _applied(row: reader_table.Row, version: int) -> bool:
    # Nothing newer is published while we wait, so an ack of a later version is garbage.
    return row.acked == version


def _late_rows(control: _native.Control, workers: list[int], version: int) -> list[RowId]:
    return [row.id for row in reader_table.claimed(control) if row.worker in workers and not _applied(row, version)]


def _absent(control: _native.Control, workers: list[int], version: int, dead: dict[RowId, int | str]) -> list[int]:
    """Named workers that have not acked: not attached yet, late, or gone."""
    done = {*control.workers_at(version), *dead.values()}
    return [worker for worker in workers if worker not in done]


def _has_heir(control: _native.Control, peers: Peers, dead: RowId, name: int | str) -> bool:
    """Has a live subscriber the same worker index? Then its ack counts, and the dead one is not reported."""
    return any(
        row.worker == name and row.id != dead and peers.alive(row.owner) for row in reader_table.claimed(control)
    )


def _closed(control: _native.Control, version: int, rows: list[RowId], absent: list[int]) -> ClosedError:
    attached = [reader_table.name_of(control, row) for row in rows]
    late = [*attached, *(worker for worker in absent if worker not in attached)]
    return ClosedError(
        f"version {version} is published, but the arena was closed by another thread before {listed(late)} applied it; "
        "who is attached can still apply it",
        version=version,
        missing=late,
    )


def _late(
    control: _native.Control, peers: Peers, version: int, rows: list[RowId], absent: list[int], dead: list[int | str]
) -> AckTimeout:
    outcome = _outcome(dead)
    attached = [reader_table.name_of(control, row) for row in rows]
    missing = [worker for worker in absent if worker not in attached]
    outcome.late = [*attached, *missing]
    stopped = [row for row in rows if peers.state(row[1]) is ProcessState.STOPPED]
    outcome.notes += [f"stopped: {', '.join(name_with_pid(control, row) for row in stopped)}"] if stopped else []
    outcome.notes += [f"not attached: {listed(missing)}"] if missing else []
    return outcome.lateness(f"version {version}", version)


def _outcome(dead: list[int | str]) -> Outcome:
    outcome = Outcome(_WORDING)
    outcome.dead = dict.fromkeys(dead, "")
    return outcome
