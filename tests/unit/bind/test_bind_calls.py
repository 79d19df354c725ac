"""Which calls of a bound module are sections, what is refused, and what other bindings of the module do."""

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


@pytest.mark.parametrize("end", ["close", "drop", "throw"])
@torch.no_grad()
def test_a_generator_that_does_not_go_on_gives_its_section_back(bound, end):
    _, worker, pub, _ = bound(Decoder)
    generator = worker.stream(torch.randn(2, 4))
    pub.publish()  # not begun: it holds nothing
    next(generator)
    with pytest.raises(shmsync.ProtocolError):
        pub.publish()
    if end == "close":
        generator.close()
    elif end == "throw":
        with pytest.raises(KeyError):
            generator.throw(KeyError())
    del generator
    gc.collect()
    pub.publish()


@torch.no_grad()
def test_a_part_that_another_arena_feeds_is_covered_in_calls_of_the_whole(publisher, subscriber):
    trainer, worker = Policy(), Policy()
    whole, part = publisher(trainer, slots=2, exclude="encoder.*"), publisher(trainer.encoder, slots=2)
    first, second = subscriber(whole), subscriber(part)
    second.bind(worker.encoder)
    first.bind(worker)
    step(trainer)
    whole.publish()
    part.publish()
    x = torch.randn(2, 4)
    assert torch.equal(worker(x), trainer(x))


@torch.no_grad()
def test_a_forward_that_was_wrapped_survives_a_new_binding(publisher, subscriber):
    trainer, worker = Policy(), Policy()
    with shmsync.Publisher(Policy()) as old, shmsync.Subscriber(old.handle) as sub:
        sub.bind(worker)
        inner = worker.forward
        worker.forward = lambda x: inner(x) + 1
    subscriber(publisher(trainer)).bind(worker)
    x = torch.randn(2, 4)
    assert torch.equal(worker(x), trainer(x) + 1)


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
        monkeypatch.setattr("shmsync.engine.bind.install.Loading.__init__", refuse)
    with pytest.raises(shmsync.Poisoned if at == "its section" else RuntimeError):
        sub.bind(worker)
    assert set(vars(worker)) == before
    assert sub._reader.followers == []
    with torch.no_grad():
        worker.head.weight.fill_(1.0)  # private, and writable
    monkeypatch.undo()
    pub.publish()
    sub.bind(worker)


def test_modules_that_are_gone_keep_nothing_alive_once_another_is_bound(publisher, subscriber):
    sub = subscriber(publisher(nn.BatchNorm1d(4)))
    for _ in range(5):
        sub.bind(nn.BatchNorm1d(4))
        gc.collect()
    assert len(sub._reader.followers) <= 2


@pytest.mark.parametrize("guard", [True, False])
def test_load_state_dict_into_a_bound_module_is_a_typed_error(bound, guard):
    trainer, worker, _, _ = bound(Policy, guard=guard)
    state = {key: torch.zeros_like(value) for key, value in trainer.state_dict().items()}
    outer = nn.ModuleDict({"policy": worker, "other": nn.Linear(1, 1)})
    for load in (
        lambda: worker.load_state_dict(state),
        lambda: worker.load_state_dict(state, assign=True),
        lambda: worker.encoder.load_state_dict({"net.weight": state["encoder.net.weight"]}, strict=False),
        lambda: outer.load_state_dict({f"policy.{key}": value for key, value in state.items()}, strict=False),
    ):
        with pytest.raises(shmsync.ProtocolError, match=r"load_state_dict\(\) would write .*deepcopy"):
            load()
    assert torch.equal(worker.head.weight, trainer.head.weight)
    outer.load_state_dict({"other.weight": torch.ones(1, 1)}, strict=False)
    assert outer["other"].weight.item() == 1
    copy.deepcopy(worker).load_state_dict(state)


@pytest.mark.parametrize("slots", [1, 2])
@torch.no_grad()
def test_tensors_that_replace_others_are_bound_with_the_next_version(bound, slots):
    trainer, worker, pub, _ = bound(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), slots)
    x = torch.randn(3, 4)
    mine = torch.full((4,), 9.0)
    worker[1].running_mean = mine
    worker[1]._buffers["running_var"] = torch.full((7,), 9.0)
    step(trainer)
    trainer[1].running_mean = torch.full((4,), 5.0)
    pub.publish()
    assert torch.equal(worker(x), trainer(x))
    assert mine.eq(9).all(), "the tensor that took the place is somebody's"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("what", ["parameter", "submodule", "shape"])
@torch.no_grad()
def test_a_replaced_parameter_is_an_error_until_it_is_back_or_bound_again(bound, slots, what):
    trainer, worker, pub, sub = bound(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), slots)
    x = torch.randn(3, 4)
    first, weight = worker[0], worker[0].weight
    other = nn.Parameter(torch.zeros(4, 5 if what == "shape" else 4))
    if what == "submodule":
        worker[0] = nn.Linear(4, 4)
    else:
        worker[0].weight = other
    step(trainer)
    pub.publish()
    for _ in range(2):
        with pytest.raises(shmsync.ManifestMismatch, match=r"0.weight|\(4, 5\)"):
            worker(x)
        assert sub.version == 1
    assert other.eq(0).all()
    if what == "submodule":
        sub.bind(worker)
    else:
        worker[0].weight = weight
    assert torch.equal(worker(x), trainer(x))
    assert torch.equal(worker(x), trainer(x))
    assert (worker[0] is first) == (what != "submodule")


@torch.no_grad()
def test_a_functional_call_uses_its_own_tensors_or_raises(bound):
    trainer, worker, pub, sub = bound(lambda: nn.Linear(4, 4), 2)
    x, mine = torch.ones(1, 4), {"weight": torch.eye(4), "bias": torch.zeros(4)}
    assert torch.equal(torch.func.functional_call(worker, mine, x), x)
    pub.publish()
    with pytest.raises(shmsync.ManifestMismatch, match="functional_call"):
        torch.func.functional_call(worker, mine, x)
    with sub.read():
        assert torch.equal(torch.func.functional_call(worker, mine, x), x)
    assert torch.equal(worker(x), trainer(x))
    assert torch.equal(mine["weight"], torch.eye(4))


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


@pytest.mark.parametrize("how", ["close", "drop", "clear"])
@torch.no_grad()
def test_a_generator_that_ends_in_another_thread_gives_its_section_back(bound, how):
    _, worker, pub, sub = bound(Decoder, 2)
    box = [worker.stream(torch.randn(2, 4))]
    next(box[0])
    ends = {"close": lambda: box[0].close(), "drop": lambda: box.pop(), "clear": box.clear}[how]
    Call(lambda: (ends(), gc.collect())).result()
    for _ in range(3):
        pub.publish()
        list(worker.stream(torch.randn(2, 4)))
        assert sub.version == pub.version


def test_two_modules_of_two_arenas_are_called_by_two_threads(publisher, subscriber):
    trainers = Policy(), Policy()
    pubs = [publisher(each, include=part) for each, part in zip(trainers, ("encoder.*", "head.*"), strict=True)]
    subs = [subscriber(pub, timeout=60.0) for pub in pubs]
    workers = Policy(), Policy()
    for worker, order in zip(workers, (subs, subs[::-1]), strict=True):
        for sub in order:
            sub.bind(worker)

    @torch.no_grad()
    def use(worker):
        for _ in range(300):
            worker(torch.ones(1, 4))

    for call in [Call(use, worker) for worker in workers]:
        call.result()


@torch.no_grad()
def test_a_closed_binding_is_not_forgotten_by_another_one(publisher, subscriber):
    trainer, worker = Policy(), Policy()
    encoder, head = publisher(trainer, include="encoder.*"), publisher(trainer, include="head.*")
    first, second = subscriber(encoder), subscriber(head)
    first.bind(worker)
    second.bind(worker)
    first.close()
    subscriber(head).bind(worker)
    with pytest.raises(shmsync.ClosedError):
        worker(torch.ones(1, 4))
    subscriber(encoder).bind(worker)
    assert torch.equal(worker(torch.ones(1, 4)), trainer(torch.ones(1, 4)))


def test_a_module_is_not_bound_elsewhere_in_the_middle_of_its_call(publisher, subscriber):
    trainer, worker = Policy(), Policy()
    first, second = subscriber(publisher(trainer)), subscriber(publisher(Policy()))
    first.bind(worker)
    with torch.no_grad(), first.read(), pytest.raises(shmsync.ProtocolError, match="leave the section first"):
        second.bind(worker)


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


@torch.no_grad()
def test_adapters_that_were_added_to_a_bound_module_are_no_error_where_the_arena_is_a_part(publisher, subscriber):
    trainer, worker = nn.Linear(4, 4), nn.Linear(4, 4)
    sub = subscriber(publisher(trainer, include=["weight", "bias"]))
    sub.bind(worker)
    worker.register_parameter("lora", nn.Parameter(torch.zeros(2)))
    assert torch.equal(worker(torch.ones(1, 4)), trainer(torch.ones(1, 4)))


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


@pytest.mark.parametrize("slots", [1, 2, 3])
@torch.no_grad()
def test_a_call_of_a_module_of_two_arenas_holds_both_versions(publisher, subscriber, slots):
    trainer, worker = Policy(), Policy()
    base, adapter = publisher(trainer, slots=slots, exclude="head.*"), publisher(trainer, slots=slots, include="head.*")
    first, second = subscriber(base), subscriber(adapter)
    first.bind(worker)
    second.bind(worker)
    held = []
    worker.head.register_forward_pre_hook(lambda *_: held.append((first.refresh(), second.refresh())))
    for publish in (base.publish, adapter.publish):
        publish()
        worker(torch.randn(2, 4))
        assert (first.version, second.version) == (base.version, adapter.version)
    assert held == [(False, False)] * 2, "one section over both"
