"""Weights with more than the policy has, and of another dtype: refused, unless the scheme is made for them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
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


def check_every_form(collector, made, said, **option):
    """What made(tag) is has to be refused in each form, unless the scheme has this option."""
    refusing = collector(Tagged())
    collecting = collector(Tagged(), scheme=ShmWeightSyncScheme(**option))
    for tag, (name, form) in enumerate(FORMS.items(), 5):
        weights = form(made(tag))
        with pytest.raises(shmsync.ManifestMismatch, match=said):
            refusing.update_policy_weights_(weights)
        assert all((tensor == 0).all() for found in ask(refusing, "policy.read") for tensor in found.values()), name
        collecting.update_policy_weights_(weights)
        for tensor in (tensor for found in ask(collecting, "policy.read") for tensor in found.values()):
            assert (tensor == tag).all() and tensor.dtype is torch.float32, name


def test_more_than_the_policy_has(collector):
    check_every_form(collector, WithCritic, r"(?s)critic\.module\.weight.*strict=False", strict=False)


def test_another_dtype(collector):
    dtype = {"*": torch.float32}
    check_every_form(collector, lambda tag: Tagged(tag).double(), r"float64.*dtype=", dtype=dtype)


def test_what_fits_must_have_the_right_shape_and_some_must_fit(collector):
    collecting = collector(Tagged(), scheme=ShmWeightSyncScheme(strict=False))
    for weights in ({"layers.0": torch.ones(5), "more": torch.ones(4)}, {"more": torch.ones(4)}, {}):
        with pytest.raises(shmsync.ManifestMismatch):
            collecting.update_policy_weights_(weights)
    assert tags(collecting) == [0, 0]
