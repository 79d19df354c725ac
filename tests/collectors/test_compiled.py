"""Compiled policies."""

from __future__ import annotations

import pytest
import torch

from support.environments.basic import SCHEMES, Policy


def in_place(policy):
    policy.compile(backend="eager")
    return policy


def around_and_inside(policy):
    policy.net = torch.compile(policy.net, backend="eager")
    policy = torch.compile(policy, backend="eager")
    policy(torch.zeros(2, 4))  # compiled code is there
    return policy


@pytest.mark.parametrize(
    ("how", "scheme"), list(zip([in_place, around_and_inside], SCHEMES, strict=True)), ids=["in place", "around"]
)
def test_a_compiled_policy_is_collected(collector, how, scheme):
    policy = how(Policy())
    batches = collector(policy=policy, weight_sync_scheme=scheme(), num_workers=1)
    next(batches)
    getattr(policy, "_orig_mod", policy).set_tag(2)
    assert batches.update_policy_weights_() == 2
    batch = next(batches)
    assert torch.equal(batch["tag"].long(), batch["policy_version"])
    state = batches.state_dict()
    assert sorted(state["policy"]) == ["echo", "net.bias", "net.weight", "tag"]
    batches.load_state_dict(state)
    assert batches.stats().version == 3
