"""Which calls of a bound module are sections, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

import shmsync
from support.weights import fail_half_way, step
from support.zoo.kinds import Policy


class Coroutine(nn.Linear):
    async def act(self, x):
        return self(x)


class OwnCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x * self.weight.sum())


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (lambda: Coroutine(2, 2), r"act\(\) is a coroutine function.*guard=False"),
        (lambda: OwnCall(2, 2), r"OwnCall defines __call__\(\) itself.*guard=False"),
        (Bare, "no call of this Bare can be guarded.*guard=False"),
    ],
)
def test_what_no_section_can_cover_is_refused_with_the_cure(publisher, subscriber, factory, says):
    sub, worker = subscriber(publisher(factory())), factory()
    with pytest.raises(shmsync.ProtocolError, match=says):
        sub.bind(worker)
    assert sub._reader.followers == []
    sub.bind(worker, guard=False)


class Later(nn.Linear):
    """Methods that run when their caller has left the section."""

    def coroutine(self, x):
        async def later():
            return self(x)

        return later()

    def generator(self, x):
        yield self(x)
        yield self(x)

    def inside_a_call(self, x):
        return sum(self.generator(x))


@pytest.mark.parametrize("method", ["coroutine", "generator"])
@torch.no_grad()
def test_a_method_that_returns_what_runs_later_is_refused_when_it_is_called(bound, method):
    trainer, worker, pub, sub = bound(lambda: Later(2, 2))
    x = torch.ones(1, 2)
    with pytest.raises(shmsync.ProtocolError, match=f"returned a {method}"):
        getattr(worker, method)(x)
    with pytest.raises(shmsync.ProtocolError, match=f"returned a {method}"):
        sub.run(getattr(worker, method), x)
    pub.publish()  # nothing is left open
    assert torch.equal(worker.inside_a_call(x), trainer.inside_a_call(x))


def test_a_bind_that_fails_leaves_no_guard_and_moves_nothing(publisher, subscriber):
    trainer, worker = Policy(), Policy()
    pub = publisher(trainer)
    sub = subscriber(pub, timeout=0.1)
    before = set(vars(worker))
    fail_half_way(pub, ("head", "weight"))
    with pytest.raises(shmsync.Poisoned):
        sub.bind(worker)
    assert set(vars(worker)) == before
    assert sub._reader.followers == []
    with torch.no_grad():
        worker.head.weight.fill_(1.0)  # private, and writable
    pub.publish()
    sub.bind(worker)


def test_a_module_with_a_tensordict_of_parameters_is_bound(bound):
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = TensorDictParams(TensorDict({"w": torch.randn(3), "n": {"b": torch.randn(2)}}, []))

        def forward(self, x):
            return x * self.params["w"].sum() + self.params["n", "b"].sum()

    trainer, worker, pub, sub = bound(Ensemble, 2)
    sub.bind(worker)
    with torch.no_grad():
        for _ in range(3):
            step(trainer)
            pub.publish()
            assert torch.equal(worker(torch.ones(2)), trainer(torch.ones(2)))


def test_what_a_cache_of_parametrizations_kept_is_gone_with_the_version(bound):
    trainer, worker, pub, _ = bound(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), 2)
    x = torch.ones(1, 3)
    with torch.no_grad(), nn.utils.parametrize.cached():
        worker(x)
        step(trainer)
        pub.publish()
        found = worker(x)
    with torch.no_grad():
        assert torch.equal(found, trainer(x))
