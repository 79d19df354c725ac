"""Policies with more than parameters: buffers, lazy and tied parameters, extra state, and other data types."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from support.torchrl import parts, policies
from support.torchrl.parts import ask
from support.torchrl.policies import Acting, Normalising, Outer, Remembering, Tied

COUNT = "module.norm.num_batches_tracked"


def notes(collecting):
    return ask(collecting, "policy.call", policies.notes)


def test_batch_norm_counts_in_each_worker_until_an_update_brings_the_trainers_counts(collector):
    policy = Acting(Normalising())
    collecting = collector(policy)
    batches = iter(collecting)
    next(batches)
    counts = [int(found[COUNT]) for found in ask(collecting, "policy.read")]
    assert min(counts) >= 10 and int(policy.module.norm.num_batches_tracked) == 0
    with torch.no_grad():
        policy.module.norm.num_batches_tracked.fill_(1000)
        policy.module.norm.running_mean.fill_(7)
        policy.module.norm.weight.fill_(3)
    collecting.update_policy_weights_()
    for found in ask(collecting, "policy.read"):
        assert int(found[COUNT]) == 1000 and found["module.norm.running_mean"] == 7 and found["module.norm.weight"] == 3
    next(batches)
    assert all(int(found[COUNT]) >= 1010 for found in ask(collecting, "policy.read"))
    assert int(policy.module.norm.num_batches_tracked) == 1000


def test_lazy_parameters_get_their_shapes_from_the_environment(collector):
    policy = Acting(nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)))
    collecting = collector(policy)
    assert policy.module[0].weight.shape == (4, 1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(2)
    collecting.update_policy_weights_()
    for found in ask(collecting, "policy.read"):
        assert len(found) == 4 and all((weight == 2).all() for weight in found.values())
    batch = next(iter(collecting))
    assert torch.equal(batch["action"], 4 * 2 * (2 * batch["observation"] + 2) + 2)


def test_lazy_parameters_that_cannot_be_run_are_refused_with_the_reason(collector):
    with pytest.raises(shmsync.ManifestMismatch, match="lazy parameters"):
        collector(Acting(nn.Sequential(nn.LazyLinear(4), nn.Linear(3, 1))))


def test_tied_parameters_stay_tied(collector):
    policy = Acting(Tied())
    collecting = collector(policy)
    assert ask(collecting, "policy.call", policies.share_memory) == [True, True]
    with torch.no_grad():
        policy.module.one.weight.fill_(5)
        policy.module.other.bias.fill_(6)
    collecting.update_policy_weights_()
    for found in ask(collecting, "policy.read"):
        assert found["module.one.weight"] == 5 and found["module.other.weight"] == 5 and found["module.other.bias"] == 6
    assert ask(collecting, "policy.call", policies.share_memory) == [True, True]
    assert policy.module.one.weight is policy.module.other.weight


def test_extra_state_of_several_modules_goes_to_each(collector):
    policy = Acting(Outer())
    policy.module.inner.write("inner")
    policy.module.deeper[1].write("deeper", "still")
    collecting = collector(policy)
    assert notes(collecting) == [[(1, ["inner"]), (2, ["deeper", "still"])]] * 2
    policy.module.inner.write("more")
    collecting.update_policy_weights_()
    assert notes(collecting) == [[(2, ["inner", "more"]), (2, ["deeper", "still"])]] * 2


def test_extra_state_grows_for_one_worker_alone(collector):
    collecting = collector(Acting(Remembering()))
    long = "y" * 100_000
    collecting.update_policy_weights_({1: Acting(Remembering([long]))})
    assert notes(collecting) == [[(0, [])], [(1, [long])]]
    collecting.update_policy_weights_(Acting(Remembering(["short", "notes"])))
    assert notes(collecting) == [[(2, ["short", "notes"])]] * 2


def test_other_data_types_scalars_and_empty_tensors(collector):
    policy = Acting(nn.Linear(1, 1))
    policy.register_parameter("short", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    policy.register_parameter("empty", nn.Parameter(torch.ones(0, 4)))
    policy.register_buffer("mask", torch.tensor([True, False]))
    policy.register_buffer("count", torch.tensor(3, dtype=torch.int64))
    collecting = collector(policy)
    with torch.no_grad():
        policy.short.fill_(2.5)
        policy.mask.logical_not_()
        policy.count.add_(1 << 40)
    collecting.update_policy_weights_()
    for found in ask(collecting, "policy.read"):
        assert found["short"].dtype == torch.bfloat16 and found["short"].tolist() == [2.5] * 3
        assert found["empty"].shape == (0, 4)
        assert found["mask"].tolist() == [False, True] and int(found["count"]) == 3 + (1 << 40)


@pytest.mark.parametrize("attribute", ["tag", "layers"])
def test_weights_that_were_looked_at_in_a_worker_still_follow(collector, attribute):
    """torch moves a tensor's memory when it is sent to another process, here as the answer to getattr_policy()."""
    policy = policies.Tagged()
    collecting = collector(policy)
    found = collecting.getattr_policy(attribute)
    assert all(weight.tolist() == [0] * len(weight) for weight in ([found] if attribute == "tag" else found))
    for tag in (1, 2):
        policy.set(tag)
        collecting.update_policy_weights_()
        assert parts.tags(collecting) == [tag, tag]
    assert policies.seen(next(iter(collecting))).unique().tolist() == [2]
