"""Waiting until workers have applied a version, and naming those that have not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ...errors import WorkerDied
from ...memory.control.reader_figures import RowId
from ..deadlines import slice_until
from ..outcome import Wording
from ..row_wait import NAP, RowWait
from .pin_wait import PinWait

_WORDING = Wording(
    "a worker applies at its next read section or refresh()",
    sent="is published",
    after_death='The others have it. Start the dead again, or go on without them: wait="all" leaves them out, a list '
    "must not name them",
    after_lateness="A worker that is merely late still applies it; give more time with timeout=. One that is idle, or "
    "waits for this process at a full queue, never does: let it call refresh(), empty the queue first, or publish "
    "without wait=",
)


class Acks(NamedTuple):
    """Whose acks a call waits for."""

    workers: list[int] | None  # their indices; None: all workers


class WorkerWatch(NamedTuple):
    """How the calls that write learn that a process of Workers has failed or died; workers/pool.py has the calls.

    The reader table shows deaths, but neither exceptions nor exit codes.

    Attributes:
        look: called in each slice of a wait for acks of this version, and at its end. Raises what a worker failed
            with, or WorkerDied for a dead one that is not to be started again.
        explains: called when the reader table shows the deaths that this error names: raises an error that says more.
            True: all of these workers run again, so the error is not to be raised.
        before_write: called before each version is written. Raises as look() does.
    """

    look: Callable[[int], None]
    explains: Callable[[WorkerDied], bool]
    before_write: Callable[[], None]


def wait_for_acks(
    waits: PinWait, version: int, workers: list[int] | None, deadline: float, closing: Callable[[], bool]
) -> None:
    """Wait until the workers have acked `version`; None: those attached now, a list: these indices, attached or not.

    A worker that leaves meanwhile is not waited for, unless it was named and had not acked. `waits` knows the rows that
    this call has reaped already, while it waited for their pins. `closing` says when the arena is about to be closed.

    Raises WorkerDied as soon as only dead ones are left to wait for, AckTimeout at the deadline, ClosedError.
    """
    what, writer, control = f"version {version}", waits.writer, waits.arena.control
    asked: list[RowId] = []
    if workers is None:
        asked = writer.wait_acks(version, writer.claimed_rows(), slice_until(deadline))
        if not asked:
            return  # the common case, without a look in Python
    # Nothing newer is published meanwhile, so an ack of a later version is garbage.
    named = {row: name for row, name in waits.died.items() if workers is not None and name in workers}
    rows = RowWait(control, waits.peers, asked, workers, lambda row: row.acked == version, named)

    def nap() -> None:
        if rows.late:
            writer.wait_acks(version, rows.late, slice_until(deadline))
        else:
            time.sleep(NAP)  # a named worker is not attached yet

    def check() -> None:
        if closing():
            raise rows.outcome(_WORDING).closing(what, version)

    rows.until(deadline, check, nap)
    for row in rows.dead:
        control.reap(*row, waits.me)  # the next publish does not wait for it
    outcome = rows.outcome(_WORDING)
    if outcome.late:
        raise outcome.lateness(what, version)
    outcome.check(what, version)
