"""A collector that needs more memory than there is: NoSpace, with both numbers, and nothing is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from support.environments.basic import Constant, Counting
from support.processes import segments, workers


class Enormous(nn.Module):
    """Its one parameter is more than any machine has, and takes nothing here: every element is the same one."""

    def __init__(self):
        super().__init__()
        self.action = nn.Parameter(torch.zeros(1).expand(1 << 42))

    def forward(self, observation):
        return torch.zeros(len(observation), dtype=torch.int64)


@pytest.mark.parametrize(("policy", "frames"), [(Constant, 400_000_000_000), (Enormous, 2)], ids=["batches", "weights"])
def test_what_cannot_fit_is_refused_and_leaves_nothing(collector, policy, frames):
    before = workers()
    with pytest.raises(shmsync.NoSpace, match=r"need [\d,]+ bytes but [\d,]+ are available"):
        collector(Counting, policy(), frames_per_batch=frames)
    assert not segments()
    assert workers() <= before
