"""Collectors that receive: one of a single process, and one that hands the weights on to its own workers."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import until
from support.torchrl import children, parts, policies
from support.torchrl.environments import Steps
from support.torchrl.parts import tags
from support.torchrl.policies import Tagged, seen


@pytest.fixture
def trainer():
    """trainer(model) -> a scheme that sends to one collector."""
    made = []

    def make(model, **options):
        scheme = ShmWeightSyncScheme(**{"timeout": 30, **options})
        made.append(scheme)
        scheme.init_on_sender(model=model, devices=[torch.device("cpu")], model_id="policy")
        scheme.connect()
        return scheme

    yield make
    for scheme in made:
        scheme.shutdown()
    until(lambda: policies.receiving_threads() == 0)  # it ends when no receiver is left


def received(scheme):
    return {"policy": pickle.loads(pickle.dumps(scheme))}


def single(policy, schemes, **options):
    return Collector(Steps, policy, weight_recv_schemes=schemes, frames_per_batch=10, total_frames=-1, **options)


# ---- a collector of one process


def test_a_collector_of_one_process_receives(trainer):
    scheme, policy = trainer(Tagged(1)), Tagged()
    collecting = single(policy, received(scheme), track_policy_version=True)
    batches = iter(collecting)
    assert seen(next(batches)).tolist() == [1] * 10
    for update in (2, 3):
        scheme.send(Tagged(update))
        batch = next(batches)
        assert seen(batch).tolist() == [update] * 10
        assert batch["next", "policy_version"].tolist() == batch["policy_version"].tolist() == [update - 1] * 10
    collecting.receive_weights()  # allowed, and needless
    collecting.policy_version_tracker.version = 7  # as load_state_dict() does since TorchRL 0.14
    assert next(batches)["policy_version"].tolist() == [7] * 10
    assert seen(next(batches)).tolist() == [3] * 10
    collecting.shutdown()
    parts.shut(collecting._receiver_schemes)
    policy.set(9)  # its own again
    assert policy.read()["layers.0"].tolist() == [9] * 4


# ---- a collector of collectors


def test_a_collector_hands_on_what_it_receives(trainer, collector):
    scheme, policy = trainer(Tagged(1), slots=2), Tagged()
    schemes = received(scheme)
    collecting = collector(policy, kind=MultiAsyncCollector, weight_recv_schemes=schemes)
    try:
        assert policy.read()["layers.0"].tolist() == [1] * 4
        assert tags(collecting) == [1, 1]
        for update in (2, 3, 4):
            scheme.send(Tagged(update))
            assert policy.read()["layers.0"].tolist() == [update] * 4
            assert tags(collecting) == [update, update]
        batch = next(iter(collecting))
        assert seen(batch).unique().tolist() == [4] and (batch["next", "policy_version"] == 3).all()
    finally:
        parts.shut(schemes)


def middle(say, schemes):
    """A process between trainer and workers: it tells what its workers collect."""
    with parts.collectors() as make:
        collecting = make(Tagged(), weight_recv_schemes=schemes)
        say(tags(collecting))
        for batch in collecting:
            say(seen(batch).unique().tolist())


def test_in_a_process_of_its_own(trainer):
    scheme = trainer(Tagged(1))
    with children.child(middle, received(scheme)) as child:
        assert child.hear() == [1, 1]
        for update in (2, 3, 4):
            scheme.send(Tagged(update))
            heard = []
            while update not in heard:
                heard = child.hear()
                assert isinstance(heard, list), heard
            assert min(heard) >= update - 1
        child.process.kill()
        child.process.join()
        with pytest.raises(shmsync.WorkerDied) as caught:
            scheme.send(Tagged(5))
        assert caught.value.missing == [0]
