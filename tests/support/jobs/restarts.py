"""What trainers and workers do around a restart of the trainer, when a test calls it."""

from __future__ import annotations

import torch

import shmsync
from support.weights import Net, stamped


def open_net(state, seed, **kwargs):
    """A publisher of a module."""
    state.pub = shmsync.Publisher(Net(seed), **kwargs)


def open_other_layout(state, name):
    """A publisher of other leaves than open_arena() has."""
    weights = {**stamped(7), "extra": torch.zeros(3), "large": torch.zeros(5)}
    state.pub = shmsync.Publisher(weights, name=name)
