"""Bound modules that are compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync


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


def test_frozen_compilation_is_refused(publisher, subscriber, monkeypatch):
    import torch._inductor.config as inductor

    sub = subscriber(publisher(nn.Linear(2, 2)))
    with inductor.patch(freezing=True), pytest.raises(shmsync.ProtocolError, match="freezing"):
        sub.bind(nn.Linear(2, 2))
