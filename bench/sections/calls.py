"""What one call costs when nobody else is there."""

from __future__ import annotations

from collections.abc import Iterator

from call_rows import attach_rows, call_rows, move_rows, update_rows
from clock import Clock
from measured import Job, taken
from row import NO_BYTES, Row


def rows(clock: Clock) -> Iterator[Row]:
    return taken(
        clock,
        [
            Job(call_rows, 3, "read(), refresh(), a guarded forward", NO_BYTES),
            Job(update_rows, 1, "update() around nothing", NO_BYTES, cost=1),
            Job(move_rows, 1, "move to a new version"),
            Job(attach_rows, 1, "attach to 1 GB", cost=2),
        ],
    )
