"""From the SIGKILL of one of four workers to WorkerDied out of send(), beside what the kernel needs."""

from __future__ import annotations

from collections.abc import Iterator

from clock import Clock
from death_rows import death_rows
from row import OK, Row


def rows(clock: Clock) -> Iterator[Row]:
    for found in death_rows(max(1, min(20, int(clock.left / 3)))):
        ours, floor = (tuple(found[f"{which}{p}_ms"] * 1e3 for p in ("p50", "p99")) for which in ("", "floor_"))
        # Who was named, and what the others have, is asserted after each kill.
        yield Row(found["row"], ours, "the process is gone", floor, f"p99 {found['limit_ms']:g} ms", OK)  # type: ignore[arg-type]
