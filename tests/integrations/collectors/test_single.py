"""A Collector of one process: it is its own worker."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import segments
from support.torchrl import policies, probes
from support.torchrl.environments import Steps
from support.torchrl.policies import Acting, Remembering, Tagged, seen

FORMS = {
    "module": lambda: Tagged(7),
    "parameters": lambda: TensorDict.from_module(Tagged(7)),
    "tensordict": lambda: TensorDict.from_module(Tagged(7)).data,
    "flat": lambda: TensorDict.from_module(Tagged(7)).data.flatten_keys("."),
    "state dict": lambda: Tagged(7).state_dict(),
}


@pytest.fixture
def collector():
    made = []

    def make(policy=None, **options):
        options = {"frames_per_batch": 10, "total_frames": -1, "track_policy_version": True, **options}
        schemes = {"policy": ShmWeightSyncScheme()}
        made.append(Collector(Steps(), policy, weight_sync_schemes=schemes, **options))
        return made[-1]

    yield make
    for collecting in made:
        collecting.shutdown()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"policy_device": "cpu"}, {"device": "cpu"}])
def test_every_form_of_weights_is_used_by_the_next_frame(collector, form, options):
    collecting = collector(Tagged(), **options)
    batches = iter(collecting)
    assert seen(next(batches)).tolist() == [0] * 10
    collecting.update_policy_weights_(FORMS[form]())
    batch = next(batches)
    assert seen(batch).tolist() == [7] * 10
    assert batch["next", "policy_version"].tolist() == [1] * 10


def test_without_weights_it_takes_the_policys(collector):
    policy = Tagged()
    collecting = collector(policy)
    batches = iter(collecting)
    for update in (1, 2):
        policy.set(update)
        collecting.update_policy_weights_()
        batch = next(batches)
        assert seen(batch).tolist() == [update] * 10
        assert batch["next", "policy_version"].tolist() == [update] * 10


def test_a_policy_made_by_a_factory(collector):
    collecting = collector(policy_factory=Tagged)
    collecting.update_policy_weights_(Tagged(3))
    assert seen(next(iter(collecting))).tolist() == [3] * 10


def test_a_partial_update_changes_what_it_names(collector):
    policy = Tagged()
    collecting = collector(policy)
    collecting.update_policy_weights_({"layers.0": torch.full((4,), 5.0)})
    assert policy.layers[0].tolist() == [5] * 4 and policy.layers[1].tolist() == [0] * 4


def test_weights_that_do_not_fit_change_nothing(collector):
    policy = Tagged()
    collecting = collector(policy)
    with pytest.raises(shmsync.ManifestMismatch, match=r"layers\.1"):
        collecting.update_policy_weights_({"layers.0": torch.ones(4), "layers.1": torch.ones(5)})
    assert all((weight == 0).all() for weight in policy.state_dict().values())


def test_extra_state(collector):
    policy = Acting(Remembering())
    collecting = collector(policy)
    collecting.update_policy_weights_(Acting(Remembering(["a", "b"])))
    assert policies.notes(policy) == [(2, ["a", "b"])]


def test_lazy_parameters(collector):
    policy = Acting(nn.LazyLinear(1))
    collecting = collector(policy)
    other = Acting(nn.Linear(1, 1))
    with torch.no_grad():
        other.module.weight.fill_(2), other.module.bias.fill_(3)
    collecting.update_policy_weights_(other)
    batch = next(iter(collecting))
    assert torch.equal(batch["action"], 2 * batch["observation"] + 3)


def test_it_starts_no_thread_and_maps_nothing(collector):
    collecting = collector(Tagged())
    collecting.update_policy_weights_(Tagged(1))
    assert "shmsync" not in probes.thread_names()
    assert segments() == []
