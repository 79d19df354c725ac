"""Modules that hold their parameters in more places than one, made on the meta device or on the CPU, and bound."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shmsync
from support.weights import step

DEVICES = ["meta", "cpu"]


class Holding(nn.Module):
    """Computes with a parameter that it finds elsewhere than in its own `_parameters`."""

    def __init__(self, holder):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.held = holder(self.weight)

    def forward(self, x):
        held = self.held
        return x @ (held() if isinstance(held, weakref.ref) else held[0])


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(5, 3), nn.GRU(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x.abs().long().clamp(max=4)[..., 0]))[0])


def recurrent(kind, **options):
    return lambda: kind(3, 4, **options)


KINDS = {
    **{
        f"{kind.__name__} {options}": recurrent(kind, **options)
        for kind, options in ((nn.RNN, {}), (nn.LSTM, {}), (nn.GRU, {"num_layers": 2, "bidirectional": True}))
    },
    "LSTM with projections": recurrent(nn.LSTM, proj_size=2, bidirectional=True, num_layers=2),
    "weight_norm of a Linear": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "MultiheadAttention": lambda: nn.TransformerDecoderLayer(3, 1, 4, dropout=0.0).self_attn,
    "Transformer layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0), 2),
    "statistics": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(2)),
    "tied embedding": Embedded,
    "a list": lambda: Holding(lambda parameter: [parameter]),
}


def output(module, x):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        out = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
    return (out[0] if isinstance(out, tuple) else out).clone()


def made(kind, device):
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        return KINDS[kind]().eval()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_module_computes_what_the_trainers_does(publisher, subscriber, kind, device, slots):
    trainer, worker = made(kind, "cpu"), made(kind, device)
    for parameter in trainer.parameters():
        nn.init.normal_(parameter)
    parameters = dict(worker.named_parameters(remove_duplicate=False))
    references = [weakref.ref(parameter) for parameter in parameters.values()] if device == "cpu" else []
    pub = publisher(trainer, slots=slots)
    subscriber(pub).bind(worker)
    x = torch.randn(3, 2, 3)
    for _ in range(3):
        expected = output(trainer, x)
        assert torch.equal(output(worker, x), expected)
        assert torch.equal(output(copy.deepcopy(worker), x), expected)
        step(trainer)
        pub.publish()
        if isinstance(worker, nn.RNNBase):
            worker.flatten_parameters()
    now = dict(worker.named_parameters(remove_duplicate=False))
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert all(reference() is not None for reference in references)


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(3, 3))


HELD = {"a weak reference": lambda: Holding(weakref.ref), "the old weight_norm": old_weight_norm}


@pytest.mark.parametrize("kind", HELD)
def test_what_cannot_get_memory_is_refused_before_anything_changes(publisher, subscriber, kind):
    def make():
        return nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3), HELD[kind]())

    trainer = make()
    with torch.device("meta"):
        worker = make()
    before = [(id(parameter), parameter.device, parameter.requires_grad) for parameter in worker.parameters()]
    sub = subscriber(publisher(trainer))
    with pytest.raises(shmsync.ProtocolError, match=r"2\.weight.* meta .*Make the module on cpu"):
        sub.bind(worker)
    gc.collect()
    assert [(id(each), each.device, each.requires_grad) for each in worker.parameters()] == before
    assert worker[0](torch.empty(2, 1, 3, device="meta"))[0].device.type == "meta"
    with torch.device("cpu"):
        worker = make()
    sub.bind(worker)
    x = torch.randn(2, 3)
    assert torch.equal(output(worker[2], x), output(trainer[2], x))


def test_a_buffer_that_a_state_dict_lacks_is_named_when_it_lies_on_meta():
    def rotary():
        module = nn.Module()
        module.body = nn.Linear(2, 2)
        module.body.register_buffer("inverse", torch.ones(2), persistent=False)
        return module

    with torch.device("meta"):
        made = rotary()
    with shmsync.Publisher(rotary().state_dict()) as pub, shmsync.Subscriber(pub.handle) as sub:
        with pytest.raises(shmsync.ManifestMismatch, match=r"body\.inverse is on the meta device.*module itself"):
            sub.bind(made)
        made.body.inverse = torch.ones(2)
        sub.bind(made)
