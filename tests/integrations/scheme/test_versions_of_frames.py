"""The version that a worker's frames are stamped with."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torchrl
from torchrl.collectors import Collector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import environments
from support.torchrl.policies import Tagged

FRAMES = 20


@pytest.fixture
def worker():
    """worker() is a trainer's scheme, its policy, and a collector as it is in a worker, with its receiver."""
    ends = []

    def make():
        policy = Tagged()
        own = copy.deepcopy(policy)
        collector = Collector(
            environments.Steps, own, frames_per_batch=FRAMES, total_frames=-1, track_policy_version=True
        )
        sender = ShmWeightSyncScheme(timeout=5.0)
        sender.init_on_sender(model_id="policy", model=policy, devices=[None])
        receiver = pickle.loads(pickle.dumps(sender))
        sender.connect()
        receiver.init_on_receiver(model=own, model_id="policy", worker_idx=0, context=collector)
        receiver.connect(worker_idx=0)
        ends.extend((collector, receiver, sender))
        return sender, policy, collector, own

    yield make
    for each in ends:
        each.shutdown()


@pytest.mark.skipif(torchrl.__version__.startswith("0.13"), reason="there a collector's state has no policy_version")
def test_frames_after_a_state_was_loaded_have_its_version(worker):
    _, _, collector, _ = worker()
    batches = iter(collector)
    next(batches)
    state = collector.state_dict()
    state["policy_version"] = 7
    collector.load_state_dict(state)
    batch = next(batches)
    assert (batch["policy_version"] == 7).all() and (batch["next", "policy_version"] == 7).all()


def test_a_policy_that_is_called_beside_the_frames_does_not_hold_the_version_back(worker):
    sender, policy, collector, own = worker()
    batches = iter(collector)
    batch = next(batches)
    with torch.no_grad():
        own(batch[0].clone())  # no frame follows
    for number in (1, 2):
        policy.set(number)
        sender.send(policy)
    batch = next(batches)
    assert (batch["policy_version"] == 2).all() and (batch["next", "policy_version"] == 2).all()
