"""WeightUpdaterBase, as people derive from it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from shmsync import WeightUpdaterBase


class Collector:
    def __init__(self):
        self.increments = 0

    def increment_version(self):
        self.increments += 1


class Recorder(WeightUpdaterBase):
    """Keeps what each worker would get."""

    def __init__(self, workers=(0, 1, 2)):
        self.workers = workers
        self.sent = []

    def all_worker_ids(self):
        return self.workers

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        self.sent.append((worker_id, server_weights))


class Even(Recorder):
    """Overrides every method that may be overridden."""

    def _get_server_weights(self):
        return nn.Linear(1, 1)

    def _maybe_map_weights(self, policy_or_weights):
        return type(policy_or_weights).__name__

    def _skip_update(self, worker_id):
        return worker_id % 2 == 1


def test_what_is_pushed_gets_to_all_workers_or_to_the_chosen():
    weights = {"weight": torch.ones(1)}
    for chosen, expected in ((None, [0, 1, 2]), (1, [1]), ([2, 0], [2, 0]), ([], [])):
        updater = Recorder()
        updater.push_weights(weights, worker_ids=chosen)
        assert [worker for worker, _ in updater.sent] == expected
        assert all(sent is weights for _, sent in updater.sent)
    with pytest.raises(ValueError, match="worker 3 is not registered"):
        Recorder().push_weights(weights, worker_ids=[0, 3])


def test_a_subclass_may_override_each_step():
    updater = Even(range(5))
    updater.push_weights()
    updater.push_weights({}, worker_ids=[1, 2])
    assert updater.sent == [(0, "Linear"), (2, "Linear"), (4, "Linear"), (2, "dict")]


def test_a_collector_is_registered_once_and_held_weakly():
    updater, collector = Recorder(), Collector()
    assert updater.collector is None
    updater.increment_version()  # of nothing
    updater.register_collector(collector)
    assert updater.collector is collector
    updater.increment_version()
    assert collector.increments == 1
    with pytest.raises(RuntimeError, match="already"):
        updater.register_collector(Collector())
    del collector
    gc.collect()
    assert updater.collector is None
    updater.increment_version()
    with pytest.raises(RuntimeError, match="already"):
        updater.register_collector(Collector())


def test_hooks_are_called_in_their_order_after_each_push_that_went_well():
    updater, called = Recorder([0]), []
    updater.register_post_hook(lambda: called.append(("first", len(updater.sent))))
    updater.register_post_hook(lambda: called.append(("second", len(updater.sent))))
    assert len(updater.post_hooks) == 2
    assert Recorder().post_hooks == []  # no two updaters share theirs
    updater.push_weights({})
    updater.push_weights({})
    with pytest.raises(TypeError):
        updater.push_weights(3)
    assert called == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]
