"""A module that several bindings feed, and one whose tensors others replace, load or use in place of its own."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import shmsync
from support.calls import Call
from support.weights import step
from support.zoo.kinds import Policy


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
    for parameter in worker.parameters():
        parameter.data = parameter.data.clone()  # it leaves the arena
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


@torch.no_grad()
def test_adapters_that_were_added_to_a_bound_module_are_no_error_where_the_arena_is_a_part(publisher, subscriber):
    trainer, worker = nn.Linear(4, 4), nn.Linear(4, 4)
    sub = subscriber(publisher(trainer, include=["weight", "bias"]))
    sub.bind(worker)
    worker.register_parameter("lora", nn.Parameter(torch.zeros(2)))
    assert torch.equal(worker(torch.ones(1, 4)), trainer(torch.ones(1, 4)))
