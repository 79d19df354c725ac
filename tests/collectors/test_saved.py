"""A saved state, and compiled policies."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from support.environments.basic import SCHEMES, Constant, Counting, Drawing, Policy, differences_after_a_load


def test_a_saved_state_goes_on_whatever_generator_an_environment_has(collector):
    kinds = np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64
    envs = [functools.partial(Drawing, kind) for kind in kinds]
    assert differences_after_a_load(collector, envs, lambda: Policy(inputs=1), num_workers=4) == []


def in_place(policy):
    policy.compile(backend="eager")
    return policy


def inside(policy):
    policy.net = torch.compile(policy.net, backend="eager")
    return policy


COMPILED = {
    "around it": lambda policy: torch.compile(policy, backend="eager"),
    "in place": in_place,
    "inside": inside,
    "twice": lambda policy: torch.compile(inside(policy), backend="eager"),
}


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize(("scheme", "called"), list(zip(SCHEMES, [False, True], strict=True)))
def test_a_compiled_policy_is_collected(collector, how, scheme, called):
    policy = COMPILED[how](Policy())
    if called:
        policy(torch.zeros(2, 4))  # compiled code is there
    batches = collector(policy=policy, weight_sync_scheme=scheme())
    next(batches)
    getattr(policy, "_orig_mod", policy).set_tag(2)
    assert batches.update_policy_weights_() == 2
    batch = next(batches)
    assert torch.equal(batch["tag"].long(), batch["policy_version"])
    state = batches.state_dict()
    assert sorted(state["policy"]) == ["echo", "net.bias", "net.weight", "tag"]
    batches.load_state_dict(state)
    assert batches.stats().version == 3


def test_an_uncompiled_policys_state_loads_into_a_compiled_one(collector):
    state = collector(policy=Policy()).state_dict()
    other = collector(policy=torch.compile(Policy(), backend="eager"))
    other.load_state_dict(state)
    assert torch.equal(other.policy.net.weight, state["policy"]["net.weight"])


def test_a_loaded_state_of_another_form_changes_nothing(collector):
    policy = Constant(1)
    batches = collector(Counting, policy)
    state = batches.state_dict()
    state["workers"] = {0: state["workers"][0]}
    state["policy"]["action"] = torch.tensor(5.0)
    with pytest.raises(ValueError, match="num_workers=1"):
        batches.load_state_dict(state)
    assert float(policy.action.detach()) == 1.0 and batches.stats().version == 1
