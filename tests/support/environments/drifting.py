"""A policy that does not keep what it was sent."""

from __future__ import annotations

import torch

from support.environments.basic import Policy


class Drifting(Policy):
    """Its forward changes a buffer, as BatchNorm's does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs)
