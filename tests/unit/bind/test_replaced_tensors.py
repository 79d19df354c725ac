"""A bound module whose tensors others replace, load or use in place of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shmsync
from support.zoo.kinds import Policy


@pytest.mark.parametrize("guard", [True, False])
def test_load_state_dict_into_a_bound_module_is_a_typed_error(bound, guard):
    trainer, worker, _, _ = bound(Policy, guard=guard)
    state = {key: torch.zeros_like(value) for key, value in trainer.state_dict().items()}
    outer = nn.ModuleDict({"policy": worker, "other": nn.Linear(1, 1)})
    for load in (
        lambda: worker.load_state_dict(state),
        lambda: worker.load_state_dict(state, assign=True),
        lambda: worker.encoder.load_state_dict({"net.weight": state["encoder.net.weight"]}, strict=False),
        lambda: outer.load_state_dict({f"policy.{key}": value for key, value in state.items()}, strict=False),
    ):
        with pytest.raises(shmsync.ProtocolError, match=r"load_state_dict\(\) would write .*deepcopy"):
            load()
    assert torch.equal(worker.head.weight, trainer.head.weight)
    outer.load_state_dict({"other.weight": torch.ones(1, 1)}, strict=False)
    assert outer["other"].weight.item() == 1
    copy.deepcopy(worker).load_state_dict(state)


@torch.no_grad()
def test_adapters_that_were_added_to_a_bound_module_are_no_error_where_the_arena_is_a_part(publisher, subscriber):
    trainer, worker = nn.Linear(4, 4), nn.Linear(4, 4)
    sub = subscriber(publisher(trainer, include=["weight", "bias"]))
    sub.bind(worker)
    worker.register_parameter("lora", nn.Parameter(torch.zeros(2)))
    assert torch.equal(worker(torch.ones(1, 4)), trainer(torch.ones(1, 4)))
