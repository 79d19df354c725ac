"""An optimizer of an adopted module does what it does to a private module, and its steps reach the workers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shmsync

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam, fused, amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
}


def convolution(memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).to(memory_format=memory_format)


def learn(module, optimizer, seed, step=None, set_to_none=True):
    torch.manual_seed(seed)
    module(torch.randn(2, 3, 5, 5)).sigmoid().square().mean().backward()
    (step or optimizer.step)()
    optimizer.zero_grad(set_to_none=set_to_none)


def assert_equal(module, other):
    for (key, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


class Twins:
    """A module to adopt and one to compare it with, both with an optimizer that has a state already."""

    def __init__(self, make, optimizer, steps=3, **options):
        self.module, self.other = make(), make()
        self.optimizer = optimizer(self.module.parameters(), **options)
        self.others = optimizer(self.other.parameters(), **options)
        self.seed = 0
        self.learn(steps)

    def learn(self, steps=1, **options):
        for _ in range(steps):
            self.seed += 1
            learn(self.module, self.optimizer, self.seed, **options)
            learn(self.other, self.others, self.seed)

    def check(self, pub, sub):
        assert_equal(self.module, self.other)
        weights = sub.snapshot().weights
        for key, tensor in self.module.state_dict().items():
            assert torch.equal(weights[tuple(key.split("."))], tensor), key


@pytest.mark.parametrize(
    ("known", "set_to_none", "memory_format"),
    [(True, True, torch.contiguous_format), (True, False, torch.channels_last), (False, True, torch.channels_last)],
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_it_would_without(adopted, kind, known, set_to_none, memory_format):
    optimizer, options = OPTIMIZERS[kind]
    twins = Twins(lambda: convolution(memory_format), optimizer, lr=0.001, **options)
    twins.learn(set_to_none=set_to_none)
    strides = [tensor.stride() for tensor in twins.module.state_dict().values()]
    pub, sub = adopted(twins.module, twins.optimizer if known else None)
    assert [tensor.stride() for tensor in twins.module.state_dict().values()] == strides
    for _ in range(5):
        if known:
            twins.learn(set_to_none=set_to_none)
        else:
            with pub.update():
                twins.learn(set_to_none=set_to_none)
        twins.check(pub, sub)
    # A checkpoint whose state lies in memory as it did before adopt().
    twins.optimizer.load_state_dict(copy.deepcopy(twins.others.state_dict()))
    for _ in range(2):
        with pub.update():
            twins.learn()
        twins.check(pub, sub)
    pub.close()
    twins.learn(2)
    assert_equal(twins.module, twins.other)


# ---- memory that tensors of the module share


class Sharing(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = nn.Parameter(self.weight.data)  # another Parameter over the same memory
        self.register_buffer("shown", view(self.weight.data))


def test_parameters_that_are_tied_stay_so(adopted):
    module = Sharing(torch.clone)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub, sub = adopted(module, optimizer)
    for value in (-1, -2):
        module.weight.grad = torch.ones(3, 3)
        optimizer.step()
        assert (module.head.weight == value).all()
        weights = sub.snapshot().weights
        assert all((weights[key] == value).all() for key in ("weight", ("head", "weight")))
    pub.close()
    module.weight.data.fill_(7)
    assert (module.head.weight == 7).all()


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w[0], lambda w: w.t()])
def test_a_buffer_over_a_parameters_memory_is_refused(publisher, view):
    module = Sharing(view)
    pub = publisher(module)
    with pytest.raises(shmsync.ManifestMismatch, match="shown and weight share memory|weight and shown share memory"):
        pub.adopt(module)
    assert module.shown.data_ptr() == module.weight.data_ptr()


def test_one_module_has_one_arena(publisher, subscriber):
    module = nn.Linear(2, 2)
    pub, other = publisher(module), publisher(module)
    pub.adopt(module)
    with pytest.raises(shmsync.ProtocolError, match="shows the memory of an arena already"):
        other.adopt(module)
    pub.close()
    other.adopt(module)
    worker = subscriber(other).bind(nn.Linear(2, 2))
    with pytest.raises(shmsync.ProtocolError, match="bound to a Subscriber"):
        publisher({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}).adopt(worker)
