"""What can be bound, and a module that is bound again, elsewhere or in part."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import shmsync
from support.jobs.engine import bind_copies
from support.weights import step


@pytest.mark.parametrize("bind", [shmsync.Subscriber.bind, bind_copies], ids=["views", "copies"])
def test_a_module_that_differs_is_refused_and_unchanged(publisher, subscriber, bind):
    sub = subscriber(publisher(nn.Linear(4, 2)))
    other = nn.Linear(4, 3)
    before = other.weight.data_ptr()
    with pytest.raises(shmsync.ManifestMismatch, match=r"weight is \(2, 4\) in the arena but \(3, 4\) in the module"):
        bind(sub, other)
    assert other.weight.data_ptr() == before
    assert "forward" not in other.__dict__
    with pytest.raises(shmsync.ManifestMismatch, match="float16"):
        bind(sub, nn.Linear(4, 2).half())


def test_modules_that_write_their_weights_are_refused(publisher, subscriber):
    embedding = nn.Embedding(3, 2, max_norm=1.0)
    sub = subscriber(publisher(embedding))
    with pytest.raises(shmsync.ProtocolError, match="max_norm"):
        sub.bind(nn.Embedding(3, 2, max_norm=1.0))


@torch.no_grad()
@pytest.mark.parametrize("guard", [True, False])
def test_a_binding_outlives_the_container_that_was_passed(both, guard):
    pi, v = nn.Linear(2, 2), nn.Linear(2, 2)
    trainer = nn.ModuleDict({"pi": nn.Linear(2, 2), "v": nn.Linear(2, 2)})
    pub, sub = both(trainer, slots=2)
    sub.bind(nn.ModuleDict({"pi": pi, "v": v}), guard=guard)
    gc.collect()
    for _ in range(4):
        step(trainer)
        pub.publish()
        with sub.read():
            assert torch.equal(pi.weight, trainer["pi"].weight)


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
@pytest.mark.parametrize("closed", [False, True])
@torch.no_grad()
def test_a_call_that_had_begun_when_the_module_was_bound_again_uses_the_new_arena(
    publisher, subscriber, consistency, closed
):
    before, after, worker = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)
    pub = publisher(before, slots=2)
    old, new = (subscriber(each, consistency=consistency) for each in (pub, publisher(after)))
    old.bind(worker)
    begun = worker.forward  # as another thread has it, which waits to enter its section
    new.bind(worker)
    if closed:
        old.close()
    else:
        step(before)
        pub.publish()
        old.refresh()  # it moves the module no more
    x = torch.randn(5, 4)
    assert torch.equal(begun(x), after(x)) and torch.equal(worker(x), after(x))
    new.close()
    with pytest.raises(shmsync.ClosedError):
        begun(x)


def test_a_part_of_a_bound_module_cannot_be_bound_elsewhere(publisher, subscriber):
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    subscriber(publisher(copy.deepcopy(whole))).bind(whole)
    with pytest.raises(shmsync.ProtocolError, match="bound already"):
        subscriber(publisher(nn.Linear(2, 2))).bind(whole[0])


def test_tied_parameters_cannot_show_two_places(publisher, subscriber):
    untied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(shmsync.ManifestMismatch, match="separate in the arena but one tensor in the module"):
        subscriber(publisher(untied)).bind(tied)


def test_what_is_no_eager_module_is_a_type_error(publisher, subscriber):
    sub = subscriber(publisher(nn.Linear(2, 2)))
    for wrong in (torch.jit.script(nn.Linear(2, 2)), {"weight": torch.zeros(2, 2)}):
        with pytest.raises(TypeError, match="eager"):
            sub.bind(wrong)
    with pytest.raises(TypeError, match="several modules into one torch.nn.ModuleDict"):
        sub.bind({"actor": nn.Linear(2, 2)})
