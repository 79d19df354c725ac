"""Whatever way a bound module is used, it computes what the trainer's module would at the version that it shows.

USES: ways in which people use each kind of module (support/zoo/kinds.py). MODES: surroundings (support/zoo/modes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from support.zoo import kinds
from support.zoo.modes import MODES
from support.zoo.world import visit


class Use(NamedTuple):
    """One way to use one kind. `whole`: Dynamo compiles it as one graph.

    `repeats`: calling it again with the same weights gives the same.
    """

    make: Callable[[], nn.Module]
    run: Callable[[Any, torch.Tensor], Any]
    whole: bool = True
    repeats: bool = True


def call(module, x):
    return module(x)


USES = {
    "mlp": Use(kinds.mlp, call),
    "mlp.forward": Use(kinds.mlp, lambda m, x: m.forward(x)),
    "policy": Use(kinds.Policy, call),
    "policy.evaluate_actions": Use(kinds.Policy, lambda m, x: m.evaluate_actions(x)),
    "policy.encoder.encode": Use(kinds.Policy, lambda m, x: m.encoder.encode(x)),
    "decoder": Use(kinds.Decoder, lambda m, x: m.generate(x)),
    "hooked": Use(kinds.Hooked, call),
    "batched": Use(kinds.Batched, call, repeats=False),
    "returning.dist": Use(kinds.Returning, lambda m, x: m.dist(x), whole=False),
    "returning.held": Use(kinds.Returning, lambda m, x: m.held(x), whole=False),
    "parametrized": Use(kinds.parametrized, call, whole=False),
}
# Each use as it is, each mode with one kind of module, and what has once gone wrong together.
CASES = [(use, "plain") for use in USES] + [("policy", mode) for mode in MODES if mode != "plain"]
CASES += [("mlp", "autocast_loop"), ("batched", "inference_mode"),
          ("decoder", "compiled_whole_after"), ("hooked", "called_by_compiled_code")]  # fmt: skip


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("use", "mode"), CASES)
def test_a_bound_module_computes_what_the_trainers_does(use, mode, slots):
    visit(USES[use], MODES[mode], slots, CASES.index((use, mode)))
