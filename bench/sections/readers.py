"""publish(wait="all") beside ping-pongs over pipes, and update() with readers asleep beside the bare futex call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from clock import Clock
from measured import Job, taken
from reader_rows import ack_row, sleeper_rows
from row import NO_BYTES, Row


def rows(clock: Clock) -> Iterator[Row]:
    jobs = []
    for readers in (4, 1, 2, 8):
        small = partial(ack_row, readers, 1, 1, "4 bytes", "one-byte ping-pong", "0.8 x")
        jobs.append(Job(small, 1, f'publish(wait="all") 4 bytes, {readers} readers'))
    jobs.append(Job(sleeper_rows, 2, "update() with readers asleep in wait_version", NO_BYTES, cost=1))
    for readers in (4, 1, 2, 8):
        large = partial(ack_row, readers, 12_500, 50_000, "50 KB", "ping-pong of 50 KB", "0.7 x")
        jobs.append(Job(large, 1, f'publish(wait="all") 50 KB, {readers} readers'))
    return taken(clock, jobs)
