"""Bound modules that are compiled, vectorised, or not there yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from support.weights import step


@torch.no_grad()
def test_dynamo_compiles_the_forward_below_the_guard(bound):
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    trainer, worker, pub, sub = bound(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 2)
    torch._dynamo.reset()
    compiled = torch.compile(worker, backend=backend)
    x = torch.randn(3, 4)
    assert torch.allclose(compiled(x), trainer(x))
    assert frames, "Dynamo left the module eager"
    for _ in range(3):
        step(trainer)
        pub.publish()
        assert torch.allclose(compiled(x), trainer(x))
    assert sub.version == pub.version


@torch.no_grad()
def test_a_compiled_module_can_be_bound(both):
    trainer, worker = nn.Linear(4, 4), nn.Linear(4, 4)
    pub, sub = both(trainer, slots=2)
    torch._dynamo.reset()
    compiled = sub.bind(torch.compile(worker, backend="eager", fullgraph=True))
    x = torch.randn(3, 4)
    for _ in range(3):
        assert torch.allclose(compiled(x), trainer(x))
        step(trainer)
        pub.publish()


def test_frozen_compilation_is_refused(publisher, subscriber, monkeypatch):
    import torch._inductor.config as inductor

    sub = subscriber(publisher(nn.Linear(2, 2)))
    with inductor.patch(freezing=True), pytest.raises(shmsync.ProtocolError, match="freezing"):
        sub.bind(nn.Linear(2, 2))


@torch.no_grad()
def test_a_module_on_the_meta_device_gets_its_weights_from_the_arena(publisher, subscriber):
    def make():
        net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        net[2].weight = net[0].weight
        return net.eval()

    trainer = make()
    with torch.device("meta"):
        worker = make()
    weight = worker[0].weight
    sub = subscriber(publisher(trainer))
    sub.bind(worker)
    x = torch.randn(2, 3)
    assert torch.equal(worker(x), trainer(x))
    assert worker[0].weight is worker[2].weight is weight
    assert weight.data_ptr() == sub.weights["0", "weight"].data_ptr()
