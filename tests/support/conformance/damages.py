"""What may happen to a worker's model so that it is not what was sent; a test calls these in the worker."""

from __future__ import annotations

import torch
from torch import nn

from support.conformance.nets import Stamped


def set_data(state):
    state.models["policy"].layer.weight.data = torch.full((2, 2), 77.0)


def replace_parameter(state):
    state.models["policy"].layer.bias = nn.Parameter(torch.full((2,), 77.0))


def replace_submodule(state):
    state.models["policy"].layer = nn.Linear(2, 2)


def untie(state):
    state.models["policy"].tied.weight = nn.Parameter(torch.full((2, 2), 77.0))


def write_buffer(state):
    state.models["policy"].count = torch.full((3,), 77)


def drop_leaf(state):
    del state.models["policy"].layer.bias


def add_leaf(state):
    state.models["policy"].extra = nn.Linear(2, 2)


def swap_in_context(state):
    """Another model is in the place of the one that was bound."""
    state.models["policy"] = Stamped(77)
    state.context.models["policy"] = state.models["policy"]


DAMAGES = {
    set_data: {"layer.weight"},
    replace_parameter: {"layer.bias"},
    replace_submodule: {"layer.weight", "layer.bias"},
    untie: {"tied.weight"},
    write_buffer: {"count"},
    drop_leaf: {"layer.bias"},
}
