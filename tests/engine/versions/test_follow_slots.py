"""A trainer that comes back with another number of slots: bound modules show whole versions of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from support.processes import until


class Scaled(nn.Module):
    """Returns views of its own weights, as policies that store an action scale do."""

    def __init__(self, value):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), float(value)))
        self.register_buffer("shift", torch.full((4,), float(value)))

    def forward(self):
        return self.scale[1:3]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2)])
def test_a_bound_module_shows_every_slot_of_the_new_arena(name, before, after):
    def shown(module, sub):
        with torch.no_grad():
            sub.refresh()
            return float(module()[0]), float(module.shift[0])

    with shmsync.Publisher(Scaled(1), name=name, slots=before) as pub:
        sub = shmsync.Subscriber(name, follow=True)
        module = sub.bind(Scaled(0))
        for value in range(2, 5):
            pub.publish(Scaled(value))
            assert shown(module, sub) == (value, value)
    with sub, shmsync.Publisher(Scaled(10), name=name, slots=after) as pub:
        until(sub.refresh)  # it looks for a new arena every 50 ms
        assert shown(module, sub) == (10, 10)
        for value in range(11, 16):
            pub.publish(Scaled(value))
            assert shown(module, sub) == (value, value)
