"""A storm of signals: timers interrupt the system calls of trainer and workers, and their handlers are Python."""

import pytest

from support.jobs.engine import attach, open_arena
from support.jobs.signals import LAST, publish_all, read_all


@pytest.mark.parametrize(("slots", "how", "consistency"), [(1, "in place", "pinned"), (2, "copied", "optimistic")])
def test_a_storm_of_signals_tears_and_loses_nothing(start, slots, how, consistency):
    trainer, *workers = start(3)
    handle = trainer.call(open_arena, slots=slots)
    for index, worker in enumerate(workers):
        worker.call(attach, handle, worker=index, consistency=consistency)
        worker.start(read_all)
    signals, version = trainer.call(publish_all, how)
    assert version == LAST
    for worker in workers:
        came, seen, torn = worker.result()
        assert torn == 0 and seen == sorted(set(seen)) and seen[-1] == LAST
        signals = min(signals, came)
    assert signals > 20
