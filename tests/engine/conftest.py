"""A trainer in a process of its own, whose arena has the name of the test."""

from __future__ import annotations

import pytest

from support.jobs.engine import open_arena


@pytest.fixture
def open_trainer(start, name):
    """open_trainer(5, slots=2) -> a process that publishes under the test's name, now version 5; it has a `handle`."""

    def make(version=1, **options):
        trainer = start()
        trainer.handle = trainer.call(open_arena, version, name=name, **options)
        return trainer

    return make
