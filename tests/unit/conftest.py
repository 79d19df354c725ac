"""Arenas for tests that need one process only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shmsync
from shmsync import _native


class Arenas:
    """Makes publishers and subscribers, and closes them at the end of the test."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def publisher(self, weights: Any, **options: Any) -> shmsync.Publisher:
        options.setdefault("timeout", 5.0)
        pub = shmsync.Publisher(weights, **options)
        self._open.append(pub)
        return pub

    def subscriber(self, source: Any, **options: Any) -> shmsync.Subscriber:
        options.setdefault("timeout", 5.0)
        handle = source.handle if isinstance(source, shmsync.Publisher) else source
        sub = shmsync.Subscriber(handle, **options)
        self._open.append(sub)
        return sub

    def close(self) -> None:
        for handle in reversed(self._open):
            handle.close()


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    made = Arenas()
    yield made
    made.close()


@pytest.fixture
def publisher(arenas: Arenas) -> Callable[..., shmsync.Publisher]:
    return arenas.publisher


@pytest.fixture
def subscriber(arenas: Arenas) -> Callable[..., shmsync.Subscriber]:
    return arenas.subscriber


@pytest.fixture
def both(publisher, subscriber):
    """both(weights, ...) -> a publisher of these weights, and a subscriber."""

    def make(weights, consistency="pinned", **options):
        pub = publisher(weights, **options)
        return pub, subscriber(pub, consistency=consistency)

    return make


@pytest.fixture
def bound(both):
    """bound(factory, ...) -> a trainer's module, a worker's that is bound to its weights, and both ends."""

    def make(factory, slots=1, consistency="pinned", **options):
        trainer, worker = factory(), factory()
        pub, sub = both(trainer, consistency, slots=slots)
        sub.bind(worker, **options)
        return trainer, worker, pub, sub

    return make


@pytest.fixture(params=["with torch's exchange table", "without"])
def table(request):
    """Both ways to find out about a tensor; the second one is for a torch before 2.10, which has no such table."""
    if request.param == "without":
        assert not _native.set_exchange_table(object)
    yield
    assert _native.set_exchange_table(torch.Tensor)


@pytest.fixture(scope="module")
def one_rank():
    """A group of processes of torch.distributed: this one alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def adopted(both):
    """adopted(module, optimizers) -> a publisher that has adopted the module, and a subscriber."""

    def make(module, optimizers=None, **options):
        pub, sub = both(module, **options)
        pub.adopt(module, optimizers)
        return pub, sub

    return make


@pytest.fixture
def pair(both):
    """pair(...) -> a publisher of one tensor "t", and its subscriber."""

    def make(slots=1, consistency="pinned", **options):
        return both({"t": torch.zeros(4)}, consistency, slots=slots, **options)

    return make
