"""Compiled and averaged models: the workers' policies get the weights, whichever side is wrapped."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from support.torchrl.pair import Counting, filled, net

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_inside(module):
    module[0] = compiled(module[0])
    return module


WRAPPERS = {"plain": lambda m: m, "compiled": compiled, "compiled inside": compiled_inside}


def numbers(module):
    return {value for tensor in (*module.parameters(), *module.buffers()) for value in tensor.flatten().tolist()}


@pytest.mark.parametrize("worker", WRAPPERS)
@pytest.mark.parametrize("trainer", [*WRAPPERS, "AveragedModel"])
def test_the_same_keys_on_both_sides(pair, trainer, worker):
    wrap = {**WRAPPERS, "AveragedModel": AveragedModel}[trainer]
    inside = filled(net(), 1)
    source, policy = wrap(inside), filled(net(), 0)
    sender = pair(source, workers=1, models=[WRAPPERS[worker](policy)]).sender
    assert numbers(policy) == {1}
    sender.send(source)
    filled(source.module if trainer == "AveragedModel" else inside, 2)
    sender.send(source)
    assert numbers(policy) == {2}
    sender.send(filled(net(), 3))
    assert numbers(policy) == {3}


def test_extra_state_goes_along(pair):
    source, own = Counting(), Counting()
    made = pair(compiled(source), workers=1, models=[own])
    source.words.append("b")
    made.sender.send(compiled(source))
    assert own.words == ["a", "b"]
    assert torch.equal(own.linear.weight, source.linear.weight)
