"""Does a learner lose time to the arena when its workers keep every processor busy?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from clock import Clock
from learner_rows import measure_learner
from measured import Job, taken
from row import Row


def rows(clock: Clock) -> Iterator[Row]:
    jobs = []
    for how, slots in (("publish()", 3), ("update()", 1), ("publish()", 2)):
        jobs.append(Job(partial(measure_learner, how, slots), 1, f"learner's step with {how}, slots = {slots}"))
    return taken(clock, jobs)
