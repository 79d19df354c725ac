"""A shmsync updater given to a TorchRL collector: each update reaches the workers."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, WeightUpdaterBase

import shmsync
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.parts import tags
from support.torchrl.policies import Tagged


def assign(policy, tag):
    """Give this worker's policy private tensors, all filled with one number."""
    for tensor in (*policy.parameters(), *policy.buffers()):
        tensor.data = torch.full_like(tensor, tag)


pytestmark = [
    pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated"),
    pytest.mark.filterwarnings("ignore:weight_updater is None"),
]


class IntoPolicy(shmsync.WeightUpdaterBase):
    """Gives what is pushed to the policies of the collector's workers; in a collector of one process to its own."""

    def __init__(self):
        self.pushes = 0

    def all_worker_ids(self):
        procs = getattr(self.collector, "procs", None)
        return None if procs is None else list(range(len(procs)))

    def _get_server_weights(self):
        return Tagged(5)

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        self.pushes += 1
        tag = float(server_weights["tag"])
        if worker_id is None:
            self.collector.policy.set(tag)
        else:
            parts.ask_one(self.collector, worker_id, "policy.call", assign, tag)


def make_updater():
    return IntoPolicy()


GIVEN = {"an instance": IntoPolicy, "its class": lambda: IntoPolicy, "a constructor": lambda: make_updater}


@pytest.fixture
def start():
    made = []

    def make(kind, updater):
        options = {"frames_per_batch": 20, "total_frames": -1, "weight_updater": updater}
        with parts.starting():
            collecting = kind(Steps if kind is Collector else [Steps] * 2, Tagged(), **options)
        made.append(collecting)
        return collecting

    yield make
    for collecting in made:
        collecting.shutdown()


def tags_of(collecting):
    if isinstance(collecting, Collector):
        return {float(collecting.policy.tag)}
    return set(tags(collecting))


@pytest.mark.parametrize(
    ("kind", "given"),
    [(Collector, "its class"), (MultiAsyncCollector, "a constructor"), (MultiSyncCollector, "an instance")],
)
def test_each_update_gets_to_the_workers(start, kind, given):
    collecting = start(kind, GIVEN[given]())
    updater = collecting.weight_updater
    assert isinstance(updater, IntoPolicy) and isinstance(updater, WeightUpdaterBase)
    assert updater.collector is collecting and updater.pushes == 0
    for number in (1, 2):
        collecting.update_policy_weights_(Tagged(number))
        assert tags_of(collecting) == {number}
    collecting.update_policy_weights_(policy_or_weights=Tagged(3))
    assert tags_of(collecting) == {3}
    collecting.update_policy_weights_()  # those of the server
    assert tags_of(collecting) == {5}
