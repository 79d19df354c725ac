"""The zoo: ways in which people use each kind of module (kinds.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from support.zoo.kinds import (
    Agent,
    Batched,
    Container,
    Decoder,
    Hooked,
    Normalised,
    Policy,
    Recurrent,
    Returning,
    mlp,
    parametrized,
    weight_norm,
)


class Use(NamedTuple):
    """One way to use one kind. `names`: what to guard when the user lists it. `whole`: Dynamo compiles it as one graph.

    `repeats`: calling it again with the same weights gives the same.
    """

    make: Callable[[], nn.Module]
    run: Callable[[Any, torch.Tensor], Any]
    names: list[str]
    whole: bool = True
    repeats: bool = True


def _call(module, x):
    return module(x)


def _forward(module, x):
    return module.forward(x)


USES = {
    "mlp": Use(mlp, _call, ["forward"]),
    "mlp.forward": Use(mlp, _forward, ["forward"]),
    "agent.get_value": Use(Agent, lambda m, x: m.get_value(x), ["get_value"]),
    "agent.get_action_and_value": Use(Agent, lambda m, x: m.get_action_and_value(x), ["get_action_and_value"]),
    "policy": Use(Policy, _call, ["forward"]),
    "policy.predict": Use(Policy, lambda m, x: m.predict(x), ["predict"]),
    "policy.evaluate_actions": Use(Policy, lambda m, x: m.evaluate_actions(x), ["evaluate_actions"]),
    "policy.encoder": Use(Policy, lambda m, x: m.encoder(x), ["encoder"]),
    "policy.encoder.encode": Use(Policy, lambda m, x: m.encoder.encode(x), ["encoder.encode"]),
    "decoder.generate": Use(Decoder, lambda m, x: m.generate(x), ["generate"]),
    "decoder.stream": Use(Decoder, lambda m, x: list(m.stream(x)), ["stream"], whole=False),
    "decoder.lazily": Use(Decoder, lambda m, x: list(m.lazily(x)), ["lazily"], whole=False),
    "normalised": Use(Normalised, _call, ["forward"], repeats=False),
    "hooked": Use(Hooked, _call, ["forward"]),
    "recurrent": Use(Recurrent, _call, ["forward"], whole=False),
    "batched": Use(Batched, _call, ["forward"], repeats=False),
    "returning.dist": Use(Returning, lambda m, x: m.dist(x), ["dist"], whole=False),
    "returning.held": Use(Returning, lambda m, x: m.held(x), ["held"], whole=False),
    "container.pi": Use(Container, lambda m, x: m.pi(x), ["pi"]),
    "weight_norm": Use(weight_norm, _call, ["forward"], whole=False),
    "parametrized": Use(parametrized, _call, ["forward"], whole=False),
}
