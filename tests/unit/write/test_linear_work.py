"""What grows with the number of leaves grows in step with it: counted in calls, which no load can change."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn

import shmsync
from shmsync.engine.source import sources
from support.calls import calls_of


def calls(work):
    """Calls of functions of Python and of C, resumed generators among them, that this work takes."""
    gc.collect()
    return len(calls_of(work))


def model(leaves, tied):
    layers = [nn.Linear(2, 2) for _ in range(leaves // 2)]
    if tied:
        for one, other in zip(layers[::2], layers[1::2], strict=True):
            other.weight = one.weight
    return nn.Sequential(*layers)


def adopted(leaves, tied, optimizer, publisher):
    module = model(leaves, tied)
    pub = publisher(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if optimizer else None
    return calls(lambda: pub.adopt(module, optimizer))


def assert_linear(work, small=100):
    """Twice as many leaves take at most twice as many calls, and something for what is there once."""
    work(small)  # what is made at the first use
    first, second, third = (work(small * factor) for factor in (1, 2, 4))
    assert second - first > small / 2  # it counts the leaves at all
    assert third - second <= 2.2 * (second - first)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
def test_adopt(publisher, tied, optimizer):
    assert_linear(lambda leaves: adopted(leaves, tied, optimizer, publisher))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("out", [False, True])
def test_snapshot(publisher, subscriber, tied, out):
    def work(leaves):
        sub = subscriber(publisher(model(leaves, tied)))
        target = sub.snapshot().weights if out else None
        return calls(lambda: sub.snapshot(target))

    assert_linear(work)


def flat(leaves):
    return nn.ModuleList([nn.Linear(2, 2) for _ in range(leaves // 2)])


def nested(leaves):
    """Towers of modules in modules, 40 levels high."""
    towers = []
    for start in range(0, leaves // 2, 40):
        tower = nn.Linear(2, 2)
        for _ in range(min(40, leaves // 2 - start) - 1):
            tower = nn.Sequential(tower, nn.Linear(2, 2))
        towers.append(tower)
    return nn.ModuleList(towers)


def listed(leaves):
    module = nn.Linear(2, 2)
    module.more = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(leaves - 2)])
    return module


def one_of_many(leaves):
    module = flat(leaves)
    for layer in module:
        layer.weight = module[0].weight
    return module


def buffered(leaves):
    return nn.ModuleList([nn.BatchNorm1d(2) for _ in range(leaves // 5)])


SHAPES = [flat, nested, listed, one_of_many, buffered]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: each.__name__)
def test_attaching_binding_and_the_first_calls(publisher, subscriber, shape):
    def work(leaves):
        trainer, worker = shape(leaves), shape(leaves).eval()
        pub = publisher(trainer, slots=2)
        layer = next(each for each in worker.modules() if isinstance(each, (nn.Linear, nn.BatchNorm1d)))
        x = torch.zeros(2, 2)

        @torch.no_grad()
        def attach_bind_and_call():
            sub = subscriber(pub)
            sub.bind(worker)
            layer(x)
            pub.publish()
            layer(x)
            sub.bind(worker)

        return calls(attach_bind_and_call)

    assert_linear(work)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: each.__name__)
def test_converting_and_copying_a_bound_module(publisher, subscriber, shape):
    def work(leaves):
        worker = shape(leaves)
        subscriber(publisher(shape(leaves), slots=2)).bind(worker, guard=False)
        return calls(worker.float)

    assert_linear(work)


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_many_patterns_are_compiled_once(publisher, monkeypatch, argument):
    patterns, compiled = 300, []

    class Counted:
        def __getattr__(self, name):
            return getattr(re, name)

        @staticmethod
        def compile(pattern, *flags):
            compiled.append(pattern)
            return re.compile(pattern, *flags)

    monkeypatch.setattr(sources, "re", Counted())
    chosen = f"some_{argument}"  # patterns that no other test has compiled
    given = {f"{part}.{number}": torch.rand(2) for part in (chosen, "others") for number in range(patterns)}
    pub = publisher(given, **{argument: [f"{chosen}.{number}" for number in range(patterns)]})
    assert len(pub.weights.flatten_keys(".").keys()) == patterns
    together = [pattern for pattern in compiled if pattern.count("some_") == patterns]
    assert len(together) == 1
    compiled.clear()
    for _ in range(3):
        given = {key: value + 1 for key, value in given.items()}
        pub.publish(given)
    module = nn.Module()
    for key, value in given.items():
        module.register_buffer(key.replace(".", "_"), value)
    with pytest.raises(shmsync.ManifestMismatch):
        pub.publish(module)
    assert not compiled


def bound_once(leaves, subscriber, publisher):
    sub, module = subscriber(publisher(model(leaves, False))), model(leaves, False)
    return calls(lambda: sub.bind(module))


def bound_again(leaves, subscriber, publisher):
    sub, module = subscriber(publisher(model(leaves, False))), model(leaves, False)
    sub.bind(module)
    return calls(lambda: sub.bind(module))


def published(leaves, subscriber, publisher):
    module = model(leaves, False)
    return calls(lambda: publisher(module))


def taken(leaves, subscriber, publisher):
    return adopted(leaves, False, False, publisher)


@pytest.mark.parametrize(
    ("work", "most"),
    [(bound_once, 149), (bound_again, 161), (published, 91), (taken, 166)],  # a few more than it takes: caches differ
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_leaf_takes_no_more_calls_than_it_did(subscriber, publisher, work, most):
    for leaves in (100, 200):
        work(leaves, subscriber, publisher)  # what is made at the first use
    small, large = (work(leaves, subscriber, publisher) for leaves in (100, 500))
    assert (large - small) / 400 <= most
