"""alias=True: the trainer's own parameters are the shared memory, as with TorchRL's scheme on a CPU."""

from __future__ import annotations

import pytest
import torch

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.parts import ask, tags
from support.torchrl.policies import Acting, Remembering, Tagged, Tied, seen


@pytest.fixture
def aliased():
    return ShmWeightSyncScheme(alias=True)


def weights(collecting):
    return [float(found["layers.1"][0]) for found in ask(collecting, "policy.read")]


def test_workers_see_what_the_trainer_writes_before_any_update(collector, aliased):
    policy = Tagged()
    collecting = collector(policy, scheme=aliased)
    for value in (1, 2):
        with torch.no_grad():
            policy.layers[1].fill_(value)
        assert weights(collecting) == [value, value]


def test_without_alias_they_do_not(collector):
    policy = Tagged()
    collecting = collector(policy)
    policy.set(1)
    assert tags(collecting) == [0, 0]


def test_the_trainers_policy_stays_one_that_can_be_trained(collector, aliased):
    policy = Tagged(1)
    collecting = collector(policy, scheme=aliased)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    sum(layer.sum() for layer in policy.layers).backward()
    optimizer.step()
    assert weights(collecting) == [0.5, 0.5]
    assert policy.layers[0].tolist() == [0.5] * 4


def test_an_update_counts_and_brings_buffers(collector, aliased):
    policy = Tagged()
    collecting = collector(policy, scheme=aliased)
    batches = iter(collecting)
    for update in (1, 2, 3):
        policy.set(update)
        collecting.update_policy_weights_()
        batch = next(batches)
        assert seen(batch).unique().tolist() == [update]
        assert (batch["next", "policy_version"] == update).all()


def test_tied_parameters(collector, aliased):
    policy = Acting(Tied())
    collecting = collector(policy, scheme=aliased)
    with torch.no_grad():
        policy.module.other.weight.fill_(3)
    for found in ask(collecting, "policy.read"):
        assert found["module.one.weight"] == 3 and found["module.other.weight"] == 3


def test_the_trainers_policy_outlives_the_collector(collector, aliased):
    policy = Tagged()
    collecting = collector(policy, scheme=aliased)
    policy.set(4)
    collecting.shutdown()
    aliased.shutdown()
    assert policy.layers[0].tolist() == [4] * 4
    policy.set(5)
    assert policy.layers[1].tolist() == [5] * 4


@pytest.mark.parametrize("options", [{"slots": 2}, {"per_worker_weights": True}])
def test_what_alias_cannot_be_combined_with_is_refused(options):
    with pytest.raises(ValueError, match="alias=True is one storage"):
        ShmWeightSyncScheme(alias=True, **options)


@pytest.mark.full  # a collector of its own
def test_extra_state_is_refused(collector, aliased):
    with pytest.raises(ValueError, match="get_extra_state"):
        collector(Acting(Remembering()), scheme=aliased)
