"""Trainers and workers in processes of their own, with an arena or a subscriber."""

from __future__ import annotations

import pytest

from support.jobs.engine import attach, open_arena


@pytest.fixture
def open_trainer(start, name):
    """open_trainer(5, slots=2) -> a process that publishes under the test's name, now version 5; it has a `handle`."""

    def make(version=1, **options):
        trainer = start()
        trainer.handle = trainer.call(open_arena, version, name=name, **options)
        return trainer

    return make


@pytest.fixture
def attached(start):
    """attached(pub, worker=5) -> a process that has a subscriber of this publisher."""

    def make(pub, **options):
        worker = start()
        worker.call(attach, pub.handle, **options)
        return worker

    return make
