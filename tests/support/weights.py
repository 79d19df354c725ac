"""Weights and modules that tell their version: all their words are its number."""

from __future__ import annotations

import torch
from torch import nn


def stamped(version, *, words=4096):
    """Weights with one value in every word of every leaf."""
    return {
        "large": torch.full((words // 2,), version),
        "layer.weight": torch.full((words // 32, 8), version),
        "layer.bias": torch.full((words // 4,), version),
        "scalar": torch.tensor(version),
    }


def stamp(weights, version):
    """Fill it in place."""
    for leaf in leaves(weights):
        leaf.fill_(version)


def leaves(weights):
    return weights.values() if isinstance(weights, dict) else weights.values(True, True)


def stamps(weights):
    """(smallest, largest) word over all leaves: equal when the weights are of one version."""
    low, high = zip(*(torch.aminmax(leaf) for leaf in leaves(weights)), strict=True)
    return int(min(low)), int(max(high))


def bytes_of(weights):
    flat = (leaf.contiguous().view(-1).view(torch.uint8) for leaf in leaves(weights))
    return b"".join(leaf.numpy().tobytes() for leaf in flat)


# ---- modules


class Net(nn.Sequential):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


class Scaled(nn.Module):
    """Returns views of its own weights, as policies that store an action scale do."""

    def __init__(self, value):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), float(value)))
        self.register_buffer("shift", torch.full((4,), float(value)))

    def forward(self, kind):
        if kind == "tensor":
            return self.scale[1:3]
        if kind == "nested":
            return {"out": (torch.zeros(2), [self.scale.view(2, 2)]), "shift": self.shift}
        return self.scale


def step(module):
    """As an optimizer does: every parameter grows by 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


def put(pub, value):
    """Publish a version whose only tensor, of four elements, is `value`."""
    return pub.publish({"t": torch.full((4,), float(value))})
