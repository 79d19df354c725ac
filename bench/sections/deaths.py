"""From the SIGKILL of one of four workers to WorkerDied out of send(), beside what the kernel needs."""

from __future__ import annotations

from collections.abc import Iterator

from clock import Clock
from death_rows import death_rows
from row import OK, Row

ROWS = 4


def rows(clock: Clock) -> Iterator[Row]:
    clock.row(ROWS)
    for number, found in enumerate(death_rows(20), 1):
        ours, floor = (tuple(found[f"{which}{p}_ms"] * 1e3 for p in ("p50", "p99")) for which in ("", "floor_"))
        # Who was named, and what the others have, is asserted after each kill.
        yield Row(found["row"], ours, "the process is gone", floor, f"p99 {found['limit_ms']:g} ms", OK)  # type: ignore[arg-type]
        clock.row(max(1, ROWS - number))
        if number < ROWS and clock.left <= 0:
            yield clock.left_out(f"{ROWS - number} other ways to die")
            return
