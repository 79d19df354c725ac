"""Modules that hold their parameters in more places than one, made on the meta device or on the CPU, and bound."""

from __future__ import annotations

import copy
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shmsync
from support.weights import step


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


@pytest.mark.parametrize(("device", "slots"), [("meta", 1), ("cpu", 3)])
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
