"""Which calls of a bound module are sections, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

import shmsync
from support.calls import Call
from support.weights import fail_half_way, step
from support.zoo.kinds import Decoder, Policy


@torch.no_grad()
def test_a_list_guards_what_it_names_and_no_more(bound):
    trainer, worker, pub, sub = bound(Policy, 2, guard=["encoder", "head"])
    x = torch.randn(2, 4)
    step(trainer)
    pub.publish()
    assert sub.version == 1
    worker.encoder.encode(x)
    assert sub.version == 2
    assert {name for name in vars(worker) if name in ("predict", "forward", "evaluate_actions")} == set()


@pytest.mark.parametrize(
    ("guard", "error", "says"),
    [
        (["actt"], ValueError, "has no 'actt' there; it has forward, predict, evaluate_actions, encoder, head"),
        (["encoder.nothing"], ValueError, "no 'nothing' there; it has forward, encode, net"),
        (["head.weight.data"], ValueError, "'weight' is no submodule"),
        (["head.weight"], ValueError, "a NoneType|cannot be replaced"),
        (["__getitem__"], ValueError, "no '__getitem__'"),
        (["__str__"], ValueError, "looks up elsewhere"),
        (["compile"], ValueError, "looks up elsewhere"),
        (["_wrapped_call_impl"], ValueError, "looks up elsewhere"),
        (iter(["forward"]), TypeError, "a list of names"),
        (["training"], ValueError, "a bool, which cannot be replaced"),
        ("predict", TypeError, r'a list of names such as \["act", "actor"\], not \'predict\''),
        (7, TypeError, "not 7"),
        ([3], TypeError, "dotted strings, not 3"),
        ([], ValueError, "guard=False"),
    ],
)
def test_what_cannot_be_named_is_refused_and_nothing_is_changed(publisher, subscriber, guard, error, says):
    sub, worker = subscriber(publisher(Policy())), Policy()
    before, place = dict(vars(worker)), worker.head.weight.data_ptr()
    with pytest.raises(error, match=says):
        sub.bind(worker, guard=guard)
    assert vars(worker) == before
    assert worker.head.weight.data_ptr() == place
    assert sub._reader.followers == []


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
    ("factory", "says", "cure"),
    [
        (lambda: Coroutine(2, 2), r"act\(\) is a coroutine function.*guard=\['forward'\]", ["forward"]),
        (lambda: OwnCall(2, 2), r"OwnCall defines __call__\(\) itself.*guard=False", ["forward"]),
        (Bare, "no call of this Bare can be guarded.*guard=False", False),
    ],
)
def test_what_no_section_can_cover_is_refused_with_the_cure(publisher, subscriber, factory, says, cure):
    sub, worker = subscriber(publisher(factory())), factory()
    with pytest.raises(shmsync.ProtocolError, match=says):
        sub.bind(worker)
    assert sub._reader.followers == []
    sub.bind(worker, guard=cure)


def test_a_method_that_returns_a_coroutine_is_refused_when_it_is_called(bound):
    class Hidden(nn.Linear):
        def act(self, x):
            async def later():
                return self(x)

            return later()

    _, worker, _, sub = bound(lambda: Hidden(2, 2))
    with pytest.raises(shmsync.ProtocolError, match="returned a coroutine"):
        worker.act(torch.ones(1, 2))
    with sub.read():  # nothing is left open
        pass


@pytest.mark.parametrize("another", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("end", ["close", "drop", "throw"])
@torch.no_grad()
def test_a_generator_that_does_not_go_on_gives_its_section_back(bound, end, another):
    _, worker, pub, sub = bound(Decoder)
    box = [worker.stream(torch.randn(2, 4))]
    pub.publish()  # not begun: it holds nothing
    next(box[0])
    with pytest.raises(shmsync.ProtocolError):
        pub.publish()

    def finish():
        if end == "close":
            box[0].close()
        elif end == "throw":
            with pytest.raises(KeyError):
                box[0].throw(KeyError())
        box.clear()
        gc.collect()

    Call(finish).result() if another else finish()
    pub.publish()
    list(worker.stream(torch.randn(2, 4)))
    assert sub.version == pub.version


@pytest.mark.parametrize("at", ["its section", "its guards"])
def test_a_bind_that_fails_leaves_no_guard_and_moves_nothing(publisher, subscriber, monkeypatch, at):
    def refuse(self, module, name, *_):
        raise RuntimeError("no more proxies")

    trainer, worker = Policy(), Policy()
    pub = publisher(trainer)
    sub = subscriber(pub, timeout=0.1)
    before = set(vars(worker))
    if at == "its section":
        fail_half_way(pub, ("head", "weight"))
    else:
        monkeypatch.setattr("shmsync.engine.bind.install_guards.Loading.__init__", refuse)
    with pytest.raises(shmsync.Poisoned if at == "its section" else RuntimeError):
        sub.bind(worker)
    assert set(vars(worker)) == before
    assert sub._reader.followers == []
    with torch.no_grad():
        worker.head.weight.fill_(1.0)  # private, and writable
    monkeypatch.undo()
    pub.publish()
    sub.bind(worker)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "vmap", "jvp"])
def test_a_version_that_comes_below_a_transform(bound, transform):
    trainer, worker, pub, _ = bound(lambda: nn.Linear(3, 1), 2)
    x = torch.randn(3)
    run = {
        "grad": lambda net: torch.func.grad(lambda x: net(x).sum())(x),
        "jacrev": lambda net: torch.func.jacrev(net)(x),
        "vmap": lambda net: torch.vmap(net)(torch.stack([x, x])),
        "jvp": lambda net: torch.func.jvp(net, (x,), (x,))[1],
    }[transform]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(trainer)
            pub.publish()
            assert torch.allclose(run(worker), run(trainer))
    step(worker_free := copy.deepcopy(worker))
    assert worker_free.weight.shape == (1, 3)


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


def test_a_guarded_call_and_method_keep_their_signature(bound):
    _, worker, _, _ = bound(Policy)
    assert inspect.signature(worker.predict) == inspect.signature(Policy().predict)
    assert inspect.signature(worker.forward) == inspect.signature(Policy().forward)
    assert worker.predict.__name__ == "predict"


@torch.no_grad()
def test_a_generator_that_an_optimistic_call_returns_is_pinned(bound):
    _, worker, pub, sub = bound(Decoder, 1, "optimistic")
    x = torch.randn(2, 4)
    steps = worker.lazily(x)
    next(steps)
    with pytest.raises(shmsync.ProtocolError):
        pub.publish()  # in place: it would change what the next steps use
    steps.close()
    assert pub.publish() == 2
    with sub.read() as section:  # the caller has said what it wants
        assert len(list(worker.lazily(x))) == 3
        assert pub.publish() == 3
    assert section.torn
