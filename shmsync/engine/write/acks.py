"""Waiting until workers have applied a version, and naming those that have not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ... import _native
from ...memory.control.reader_figures import RowId
from ...memory.system.process import Peers
from ..deadlines import slice_until
from ..outcome import Wording
from ..row_wait import NAP, RowWait

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
    died: Mapping[RowId, int | str],
    closing: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the workers have acked `version`; None: those attached now, a list: these indices, attached or not.

    A worker that leaves meanwhile is not waited for, unless it was named and had not acked. `died` has the rows that
    this call has reaped already, while it waited for their pins. `closing` says when the arena is about to be closed.

    Raises WorkerDied as soon as only dead ones are left to wait for, AckTimeout at the deadline, ClosedError.
    """
    what = f"version {version}"
    asked: list[RowId] = []
    if workers is None:
        asked = writer.wait_acks(version, writer.claimed_rows(), slice_until(deadline))
        if not asked:
            return  # the common case, without a look in Python
    # Nothing newer is published meanwhile, so an ack of a later version is garbage.
    named = {row: name for row, name in died.items() if workers is not None and name in workers}
    rows = RowWait(control, peers, asked, workers, lambda row: row.acked == version, named)

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
        control.reap(*row, me)  # the next publish does not wait for it
    outcome = rows.outcome(_WORDING)
    if outcome.late:
        raise outcome.lateness(what, version)
    outcome.check(what, version)
