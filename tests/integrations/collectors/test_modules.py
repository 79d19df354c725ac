"""Policies with more than parameters: buffers, and extra state."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn

from support.torchrl import policies
from support.torchrl.parts import ask
from support.torchrl.policies import Acting, Remembering


class Normalising(nn.Module):
    """BatchNorm in train mode: its forward writes in its buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, observation):
        return self.norm(torch.stack([observation, observation + 1]))[0]


class Outer(nn.Module):
    """Two modules with notes, one in the other."""

    def __init__(self):
        super().__init__()
        self.inner = Remembering()
        self.deeper = nn.Sequential(nn.Identity(), Remembering())

    def forward(self, observation):
        return self.inner(observation) + self.deeper(observation)


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


def test_extra_state_of_several_modules_goes_to_each(collector):
    policy = Acting(Outer())
    policy.module.inner.write("inner")
    policy.module.deeper[1].write("deeper", "still")
    collecting = collector(policy)
    assert notes(collecting) == [[(1, ["inner"]), (2, ["deeper", "still"])]] * 2
    policy.module.inner.write("more")
    collecting.update_policy_weights_()
    assert notes(collecting) == [[(2, ["inner", "more"]), (2, ["deeper", "still"])]] * 2


def test_policy_without_tensors_counts_its_updates(collector):
    collecting = collector(Acting(nn.Identity()))
    batches = iter(collecting)
    next(batches)
    collecting.update_policy_weights_()
    collecting.update_policy_weights_(TensorDict())
    assert set(next(batches)["policy_version"].flatten().tolist()) == {2}
