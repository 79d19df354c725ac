"""What can be bound, and a module that is bound again, to another arena or in part."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import shmsync
from support.jobs.engine import bind_copies
from support.weights import step
from support.zoo.kinds import Policy


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


class Viewing(nn.Linear):
    """A buffer is a view of a parameter."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("transposed", self.weight.detach().t(), persistent=False)


@pytest.mark.parametrize("published", [lambda trainer: trainer, nn.Module.state_dict], ids=["module", "state_dict"])
def test_a_buffer_that_is_a_view_of_a_parameter_is_refused(publisher, subscriber, published):
    sub = subscriber(publisher(published(Viewing())))
    worker = Viewing()
    places = [each.data_ptr() for each in worker.parameters()]
    with pytest.raises(shmsync.ManifestMismatch, match=r"transposed is a view of weight,.* persistent=True"):
        sub.bind(worker)
    assert [each.data_ptr() for each in worker.parameters()] == places


def test_a_lazy_module_is_refused_until_it_has_run(publisher, subscriber):
    sub = subscriber(publisher(nn.Linear(3, 2)))
    worker = nn.LazyLinear(2)
    with pytest.raises(shmsync.ProtocolError, match="weight is not initialised yet.*run it once before binding it"):
        sub.bind(worker)
    worker(torch.ones(1, 3))
    sub.bind(worker)
    assert torch.equal(worker.weight, sub.weights["weight"])


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


def tied(module):
    other = nn.Linear(4, 8)
    other.weight = module.encoder.net.weight
    return other


@pytest.mark.parametrize(
    ("another", "include"),
    [
        (lambda worker: worker, None),
        (lambda worker: worker, "head.*"),
        (lambda worker: worker.head, None),
        (lambda worker: nn.ModuleDict({"policy": worker}), "policy.head.*"),
        (tied, None),
    ],
    ids=["the module", "another part of it", "a submodule", "a whole", "a module with one of its tensors"],
)
@torch.no_grad()
def test_a_module_is_bound_to_one_arena(publisher, subscriber, another, include):
    """What shares a tensor with it is refused, and changes nothing, until the other Subscriber is closed."""
    trainer, worker = Policy(), Policy()
    first = subscriber(publisher(trainer, include="encoder.*" if include else None))
    first.bind(worker)
    second = subscriber(publisher(copy.deepcopy(other := another(worker)), include=include))
    with pytest.raises(shmsync.ProtocolError, match=r"bound to arena .*ModuleDict"):
        second.bind(other)
    assert torch.equal(worker.encoder(torch.ones(1, 4)), trainer.encoder(torch.ones(1, 4)))
    first.close()
    second.bind(other)


@torch.no_grad()
def test_guards_of_parts_follow_the_binding_of_the_whole(both):
    trainer, worker = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pub, sub = both(trainer, slots=2)
    sub.bind(worker)
    sub.bind(worker)
    step(trainer)
    pub.publish()
    worker[0](torch.ones(1, 2))
    assert sub.version == pub.version
    sub.bind(worker, guard=False)
    assert "forward" not in vars(worker) and "_compiled_call_impl" not in vars(worker[0])


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
