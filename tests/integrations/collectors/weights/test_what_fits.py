"""Weights with more than the policy has, and of another dtype: refused, unless the scheme is made for them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.environments import Steps
from support.torchrl.parts import ask, tags
from support.torchrl.policies import Acting, Remembering, Tagged, notes

KINDS = [Collector, MultiSyncCollector]


class WithCritic(Tagged):
    def __init__(self, tag):
        super().__init__(tag)
        self.critic = Acting(Remembering(["of the critic"]))


FORMS = {
    "module": lambda module: module,
    "tensordict": TensorDict.from_module,
    "dotted tensordict": lambda module: TensorDict.from_module(module).data.flatten_keys("."),
    "state dict": lambda module: module.state_dict(),
}


def collecting_with(collector, kind, policy, scheme):
    if kind is not Collector:
        return collector(policy, kind=kind, scheme=scheme)
    schemes = {"policy": scheme}
    return Collector(Steps(), policy, weight_sync_schemes=schemes, frames_per_batch=5, total_frames=-1)


def values(collecting):
    """The weights of each worker's policy; a Collector is its own worker."""
    return [collecting.policy.read()] if isinstance(collecting, Collector) else ask(collecting, "policy.read")


def check_every_form(collector, kind, made, said, **option):
    """What made(tag) is has to be refused in each form, unless the scheme has this option."""
    refusing = collecting_with(collector, kind, Tagged(), ShmWeightSyncScheme())
    collecting = collecting_with(collector, kind, Tagged(), ShmWeightSyncScheme(**option))
    for tag, (name, form) in enumerate(FORMS.items(), 5):
        weights = form(made(tag))
        with pytest.raises(shmsync.ManifestMismatch, match=said):
            refusing.update_policy_weights_(weights)
        assert all((tensor == 0).all() for found in values(refusing) for tensor in found.values()), name
        collecting.update_policy_weights_(weights)
        for tensor in (tensor for found in values(collecting) for tensor in found.values()):
            assert (tensor == tag).all() and tensor.dtype is torch.float32, name
    for each in (refusing, collecting):
        each.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_the_policy_has(collector, kind):
    check_every_form(collector, kind, WithCritic, r"(?s)critic\.module\.weight.*strict=False", strict=False)


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype(collector, kind):
    dtype = {"*": torch.float32}
    check_every_form(collector, kind, lambda tag: Tagged(tag).double(), r"float64.*dtype=", dtype=dtype)


@pytest.mark.parametrize("slots", [1, 2])
def test_both_at_once_for_some_workers(collector, slots):
    scheme = ShmWeightSyncScheme(strict=False, dtype={"*": torch.float32}, slots=slots)
    collecting = collector(Tagged(), scheme=scheme)
    collecting.update_policy_weights_(WithCritic(5).double(), worker_ids=[1])
    collecting.update_policy_weights_()
    assert tags(collecting) == [0, 5]
    collecting.update_policy_weights_({0: WithCritic(6).state_dict(), 1: Tagged(7).double()})
    assert tags(collecting) == [6, 7]


def test_what_fits_must_have_the_right_shape_and_some_must_fit(collector):
    collecting = collector(Tagged(), scheme=ShmWeightSyncScheme(strict=False))
    for weights in ({"layers.0": torch.ones(5), "more": torch.ones(4)}, {"more": torch.ones(4)}, {}):
        with pytest.raises(shmsync.ManifestMismatch):
            collecting.update_policy_weights_(weights)
    assert tags(collecting) == [0, 0]


def test_extra_state_of_other_modules_is_left_out(collector):
    collecting = collector(Acting(Remembering()), scheme=ShmWeightSyncScheme(strict=False))
    other = Acting(Remembering(["a"]))
    other.more = nn.ModuleList([Remembering(["more"])])
    collecting.update_policy_weights_(other)
    assert ask(collecting, "policy.call", notes) == [[(1, ["a"])]] * 2


def test_strict_is_a_bool():
    with pytest.raises(TypeError, match="strict is True or False, not 'no'"):
        ShmWeightSyncScheme(strict="no")
