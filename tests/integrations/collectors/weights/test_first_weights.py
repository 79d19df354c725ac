"""The weights that workers start with: every form that init_on_sender() takes, and policies made by factories."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict import TensorDict

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import environments
from support.torchrl.parts import tags
from support.torchrl.policies import Tagged, seen

CPU = torch.device("cpu")


@pytest.fixture
def scheme():
    scheme = ShmWeightSyncScheme()
    yield scheme
    scheme.shutdown()


def test_a_model_and_devices_with_the_values_that_it_has_when_the_collector_is_made(collector, scheme):
    model = Tagged(1)
    scheme.init_on_sender(model=model, devices=[CPU, CPU], model_id="policy")
    model.set(2)
    collecting = collector(Tagged(9), scheme=scheme)
    assert tags(collecting) == [2, 2]
    model.set(3)
    collecting.update_policy_weights_()
    assert tags(collecting) == [3, 3]


def test_a_factory_for_each_worker(collector):
    collecting = collector(policy_factory=[functools.partial(Tagged, 1), functools.partial(Tagged, 2)])
    assert tags(collecting) == [1, 2]
    collecting.update_policy_weights_({0: TensorDict.from_module(Tagged(3)), 1: TensorDict.from_module(Tagged(4))})
    assert tags(collecting) == [3, 4]
    collecting.update_policy_weights_(Tagged(5), worker_ids=[1])
    assert tags(collecting) == [3, 5]
    assert seen(next(iter(collecting))).float().mean(1).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing"),
        ({"model": Tagged()}, "devices="),
        ({"model": Tagged(), "devices": [CPU], "num_workers": 2}, "num_workers=2"),
        ({"model": Tagged(), "device_map_fn": max}, "num_workers="),
        ({"params_map": {0: TensorDict()}, "devices": [CPU]}, "params_map.*and more"),
        ({"params_map": {0: {}}}, "worker index to TensorDict"),
    ],
)
def test_contradictory_or_missing_arguments_are_refused(scheme, given, message):
    with pytest.raises(ValueError, match=message):
        scheme.init_on_sender(**given)
    assert not scheme.initialized_on_sender


def test_a_model_id_that_workers_do_not_have_is_named(collector, scheme):
    scheme.init_on_sender(model=environments.Critic(), devices=[CPU, CPU], model_id="env.no_such_net")
    with pytest.raises((AttributeError, ValueError), match="no_such_net"):
        collector(Tagged(), schemes={"policy": ShmWeightSyncScheme(), "env.no_such_net": scheme})


def test_weights_that_do_not_fit_a_workers_policy_are_refused_when_the_collector_is_made(collector, scheme):
    scheme.init_on_sender(model=Tagged(size=8), devices=[CPU, CPU], model_id="policy")
    with pytest.raises(shmsync.ManifestMismatch, match=r"layers\.0 is \(8,\).*\(4,\)"):
        collector(Tagged(size=4), scheme=scheme)


def test_a_worker_that_the_trainer_does_not_expect_is_refused(collector, scheme):
    scheme.init_on_sender(model=Tagged(), devices=[CPU], model_id="policy")
    with pytest.raises(RuntimeError, match=r"worker_idx is 1, but the trainer expects workers \[0\]"):
        collector(Tagged(), scheme=scheme)
