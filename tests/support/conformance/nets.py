"""The model that the trainer and the workers of this suite share, and the forms of its weights."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn

from support.weights import fill as stamp


class Stamped(nn.Module):
    """Every parameter and buffer holds one number. A forward tells the smallest and the largest of them."""

    def __init__(self, value=0, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        stamp(self, value)

    def forward(self):
        low, high = zip(*(torch.aminmax(t) for t in (*self.parameters(), *self.buffers())), strict=True)
        return int(min(low)), int(max(high))


class Tied(Stamped):
    """Two names for one weight, and a buffer that no state_dict has."""

    def __init__(self, value=0):
        super().__init__(value, width=2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.layer.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        stamp(self, value)


def ask(module):
    """What it is filled with; a pair, if that is not one number."""
    with torch.no_grad():
        low, high = module()
    return low if low == high else (low, high)


def shared(module):
    """The module's weights as a plain TensorDict in shared memory, as users of torch make it."""
    return TensorDict.from_module(module).data.clone().share_memory_()


def numbers(weights):
    """What the elements of a TensorDict are."""
    return {float(value) for leaf in weights.values(True, True) for value in leaf.reshape(-1)}


def held(module):
    """What the first element of each leaf is."""
    with torch.no_grad():
        module()  # a bound module moves to the newest version
    return {name: float(tensor.flatten()[0]) for name, tensor in module.state_dict().items()}


FORMS = {
    "module": lambda value: Stamped(value),
    "state_dict": lambda value: Stamped(value).state_dict(),
    "tensordict": lambda value: TensorDict.from_module(Stamped(value)).data,
    "nested dict": lambda value: TensorDict.from_module(Stamped(value)).data.to_dict(),
}
