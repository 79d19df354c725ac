"""Weights and modules that tell their version: all their words are its number."""

from __future__ import annotations

import contextlib

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
    return b"".join(leaf.cpu().numpy().tobytes() for leaf in flat)


# ---- modules


class Net(nn.Sequential):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def fill(module, value):
    """The module, every parameter and buffer filled with this value."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(value)
    return module


def step(module):
    """As an optimizer does: every parameter grows by 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


def put(pub, value):
    """Publish a version whose only tensor, of four elements, is `value`."""
    return pub.publish({"t": torch.full((4,), float(value))})


def fail_half_way(pub, leaf, value=2):
    """An update() that raises when it has written one leaf."""
    with contextlib.suppress(ZeroDivisionError):
        with pub.update() as weights:
            weights[leaf].fill_(value)
            raise ZeroDivisionError
        raise AssertionError("update() hid the error")


class Counting(nn.Module):
    """Each result is the version of the weights that made it; a mixture of versions is no whole number."""

    def __init__(self):
        super().__init__()
        self.first = Part()
        self.last = Part()

    def forward(self, x):
        return (self.first(x) + self.last(x)) / 2

    def act(self, x):
        return (self(x) + self.first.bias) / 2


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("bias", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return (self.weight.sum() + self.bias) / 5

    act = forward
