"""Bound modules that are compiled."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def test_dynamo_compiles_the_forward_below_the_guard(bound):
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    trainer, worker, _, _ = bound(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 2)
    torch._dynamo.reset()
    compiled = torch.compile(worker, backend=backend)
    x = torch.randn(3, 4)
    assert torch.allclose(compiled(x), trainer(x))
    assert frames, "Dynamo left the module eager"
