"""publish() of large and of many weights, beside the fastest flat copy of the same bytes with as many threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from clock import Clock
from copy_rows import CASES, large_rows, small_row
from measured import Job, taken
from row import Row


def rows(clock: Clock) -> Iterator[Row]:
    jobs = [Job(small_row, 1, "publish 1.6 MB in 200 tensors")]
    for count, megabytes, most in CASES:
        what = f"publish {megabytes} MB in {count} tensors"
        jobs.append(Job(partial(large_rows, count, megabytes, most), 3, what, cost=megabytes / 100))
    return taken(clock, jobs)
