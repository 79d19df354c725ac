"""Weights with more than the policy has, and of another dtype: refused, unless the scheme is made for them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.environments import Steps
from support.torchrl.parts import ask, tags
from support.torchrl.policies import Acting, Remembering, Tagged


class WithCritic(Tagged):
    def __init__(self, tag):
        super().__init__(tag)
        self.critic = Acting(Remembering(["of the critic"]))


FORMS = {
    "module": lambda module: module,
    "tensordict": TensorDict.from_module,
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


def test_more_than_the_policy_has(collector):
    check_every_form(
        collector, MultiSyncCollector, WithCritic, r"(?s)critic\.module\.weight.*strict=False", strict=False
    )


def test_another_dtype(collector):
    dtype = {"*": torch.float32}
    check_every_form(collector, Collector, lambda tag: Tagged(tag).double(), r"float64.*dtype=", dtype=dtype)


def test_what_fits_must_have_the_right_shape_and_some_must_fit(collector):
    collecting = collector(Tagged(), scheme=ShmWeightSyncScheme(strict=False))
    for weights in ({"layers.0": torch.ones(5), "more": torch.ones(4)}, {"more": torch.ones(4)}, {}):
        with pytest.raises(shmsync.ManifestMismatch):
            collecting.update_policy_weights_(weights)
    assert tags(collecting) == [0, 0]
