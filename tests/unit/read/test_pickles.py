"""Pickles and copies of live weights: as large as the weights, private, writable, and of one version."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import pickle
import time
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

import shmsync
from support.calls import meanwhile
from support.choice import first
from support.processes import PATIENCE
from support.weights import expect_ones, tensors

SIZES = {"small": (200, 100), "large": (4, 250_000)}


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    resource_sharer.stop()  # which hands out tensors that were sent


class Net(nn.Module):
    """Leaves of one size in two submodules, in rows and not; a buffer, which is looked at first; a tied parameter."""

    def __init__(self, leaves, width):
        super().__init__()
        self.register_buffer("noise", torch.ones(width))
        for part, make in (("first", torch.ones), ("second", lambda width: torch.ones(2, width // 2).t())):
            params = [nn.Parameter(make(width)) for _ in range(leaves // 2)]
            setattr(self, part, nn.ParameterList(params))
        self.tied = self.first[0]

    def forward(self, x):
        return x * self.tied + self.noise


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def loaded(data, **options):
    return torch.load(io.BytesIO(data), **options)


def cloudpickled(value):
    reason = "this way needs cloudpickle, which shmsync[collectors] brings"
    return pytest.importorskip("cloudpickle", reason=reason).dumps(value)


loaded_all = functools.partial(loaded, weights_only=False)
PICKLES = {
    **{f"pickle {p}": (functools.partial(pickle.dumps, protocol=p), pickle.loads) for p in (2, 5)},
    "save": (saved, loaded_all),
    "old save": (functools.partial(saved, _use_new_zipfile_serialization=False), loaded_all),
    "cloudpickle": (cloudpickled, pickle.loads),
    "multiprocessing": (lambda value: bytes(ForkingPickler.dumps(value)), pickle.loads),
    "deepcopy": (copy.deepcopy, lambda value: value),
}  # fmt: skip

OBJECTS = {
    "snapshot": lambda w: w.sub.snapshot(),
    "snapshot's weights": lambda w: w.sub.snapshot().weights,
    "snapshot's leaf": lambda w: w.sub.snapshot().weights["first", "1"],
    "sub.weights": lambda w: w.sub.weights,
    "pub.weights": lambda w: w.pub.weights,
    "bound": lambda w: w.worker,
    "submodule": lambda w: w.worker.first,
    "state_dict": lambda w: w.worker.state_dict(),
    "parameters": lambda w: list(w.worker.parameters()),
    "parameter": lambda w: w.worker.first[1],
    "buffer": lambda w: w.worker.noise,
    "view": lambda w: w.sub.weights["first", "1"],
    "slice": lambda w: w.sub.weights["first", "1"][3:],
    "empty": lambda w: w.sub.weights["first", "1"][:0],
    "trainer": lambda w: w.trainer,
    "trainer's state_dict": lambda w: w.trainer.state_dict(),
    "trainer's parameter": lambda w: w.trainer.first[1],
    "optimizer": lambda w: w.optimizer.state_dict(),
}


class World:
    def __init__(self, size, slots, publisher, subscriber, consistency="pinned"):
        self.trainer, self.worker = Net(*SIZES[size]), Net(*SIZES[size])
        self.optimizer = torch.optim.SGD(self.trainer.parameters(), lr=0.0, momentum=0.9)
        for parameter in self.trainer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.pub = publisher(self.trainer, slots=slots)
        if slots == 1:
            self.pub.adopt(self.trainer, self.optimizer)
        self.optimizer.step()
        self.sub = subscriber(self.pub, consistency=consistency)
        self.sub.bind(self.worker)
        self.value = 1.0

    def advance(self):
        self.value += 1
        with torch.no_grad(), self.pub.update() as weights:
            for each in weights.values(True, True):
                each.fill_(self.value)
            self.trainer.noise.fill_(self.value)


def plain(value):
    """Private tensors like those in it."""
    return [torch.rand(each.shape) for each in {id(each): each for each in tensors(value)}.values()]


def is_private(found, value):
    for each in found:
        assert each.flatten().tolist() == [value] * each.numel() or not value
        with torch.no_grad():
            each.add_(1.0)  # in an arena this is a SIGSEGV


def becomes_private(what, how, slots):
    """Torch's own tensors become its shared memory in a queue: a trainer's buffers, and all of one without adopt()."""
    if how != "multiprocessing":
        return True
    return what not in ["trainer", "trainer's state_dict"] and (slots == 1 or what != "trainer's parameter")


PRIVATE = [each for each in itertools.product(OBJECTS, PICKLES, [1, 2]) if becomes_private(*each)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("what", "how", "slots"), PRIVATE)
@pytest.mark.parametrize("inside", [False, True])
def test_a_pickle_is_as_large_as_the_weights_and_private(what, how, slots, size, inside, publisher, subscriber):
    world = World(size, slots, publisher, subscriber)
    if slots == 2 and "trainer" not in what and what != "optimizer":
        world.advance()
    dump, load = PICKLES[how]
    value = OBJECTS[what](world)
    if inside:
        with world.sub.read():
            value = OBJECTS[what](world)
            data = dump(value)
    else:
        data = dump(value)
    expected = 0.0 if what == "optimizer" else 1.0 if "trainer" in what else world.value
    if isinstance(data, bytes):
        nbytes = sum(each.numel() * 4 for each in plain(value))
        assert len(data) <= 1.3 * nbytes + 1000 * (1 + len(tensors(value)))
        if how != "multiprocessing":
            assert len(data) <= 1.1 * len(dump(plain(value))) + 200 * (20 + len(tensors(value)))
    out = load(data)
    found = tensors(out)
    assert len(found) == len(tensors(value)) and [t.shape for t in found] == [t.shape for t in tensors(value)]
    assert {type(t) for t in found} == {type(t) for t in tensors(value)}
    assert [t.stride() for t in found] == [t.stride() for t in tensors(value)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    assert sum(sizes.values()) <= 1.3 * sum(t.numel() * 4 for t in tensors(value)) + 100_000 * (what == "slice")
    if isinstance(out, Net):
        assert out.tied is out.first[0] and type(out) is Net
        with torch.no_grad():
            assert out(torch.zeros(1)).unique().tolist() == [expected]  # without the guard of what was bound
    world.advance()
    world.sub.refresh()
    is_private({each.data_ptr(): each for each in found}.values(), expected)  # tied ones stay one


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("what", ["bound", "state_dict", "sub.weights", "parameter", "trainer's state_dict"])
def test_weights_only_loads_what_was_saved(what, slots, publisher, subscriber):
    world = World("small", slots, publisher, subscriber)
    value = OBJECTS[what](world)
    if isinstance(value, nn.Module):
        value = value.state_dict()
    elif isinstance(value, TensorDictBase):
        value = dict(value.flatten_keys("."))
    found = loaded(saved(value), weights_only=True)
    is_private(tensors(found)[:1], 1.0)
    if isinstance(found, dict) and "tied" in found:
        assert found["tied"].data_ptr() == found["first.0"].data_ptr() != value["tied"].data_ptr()


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("what", ["parameter", "view", "buffer", "slice", "trainer's parameter"])
def test_copy_copy_is_private(what, slots, publisher, subscriber):
    world = World("small", slots, publisher, subscriber)
    value = OBJECTS[what](world)
    first = copy.copy(value)
    world.advance()
    second = copy.copy(OBJECTS[what](world))
    assert type(first) is type(value) and first.requires_grad == value.requires_grad
    assert first.tolist() == [1.0] * first.numel()
    if "trainer" not in what or slots == 1:
        assert second.tolist() == [2.0] * first.numel()
    is_private([first], 1.0)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
@pytest.mark.parametrize("how", ["pickle 5", "save", "deepcopy", "multiprocessing"])
@pytest.mark.parametrize("what", ["bound", "state_dict", "sub.weights", "parameters", "pub.weights"])
def test_a_pickle_is_of_one_version(what, how, consistency, slots, publisher, subscriber):
    """While another thread publishes as fast as it can."""
    world = World("small", slots, publisher, subscriber, consistency)
    dump, load = PICKLES[how]
    numbers = itertools.count(2.0)

    def train():
        if what == "pub.weights":
            time.sleep(0.001)  # the writer is busy half of the time, and pickles are refused then
        number = next(numbers)
        with contextlib.suppress(shmsync.WriterBusy), torch.no_grad():
            world.pub.publish({name: torch.full_like(t, number) for name, t in source.items()})

    source = {name: t.detach().clone() for name, t in world.trainer.state_dict(keep_vars=True).items()}
    with meanwhile(train):
        for _ in range(8):
            value = OBJECTS[what](world)
            try:
                found = tensors(load(dump(value)))
            except shmsync.WriterBusy:
                assert what == "pub.weights"
                continue
            assert len({number for each in found for number in (each.min().item(), each.max().item())}) == 1


def test_a_view_of_a_closed_arena_is_copied_too(publisher, subscriber):
    world = World("large", 2, publisher, subscriber)
    view = world.worker.state_dict()
    world.sub.close()
    assert len(pickle.dumps(view["first.1"])) < 1.3 * view["first.1"].nbytes
    assert copy.deepcopy(world.worker).first[1].untyped_storage().nbytes() == view["first.1"].nbytes


@pytest.mark.parametrize("what", first(["state_dict", "parameters", "pub.weights"], 2))
def test_arguments_of_a_spawned_process_arrive(what, publisher, subscriber):
    world = World("small", 1, publisher, subscriber)
    args = (tensors(OBJECTS[what](world)),)
    child = torch.multiprocessing.get_context("spawn").Process(target=expect_ones, args=args)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0


def test_other_tensors_are_left_to_torch(publisher):
    shared = torch.ones(8)
    first = shared[:2]
    publisher({"t": torch.ones(1)})
    again = copy.copy(first)
    again.zero_()
    assert shared.tolist()[:2] == [0, 0]  # as torch does it
    both = copy.deepcopy([first, shared])
    assert both[0].data_ptr() == both[1].data_ptr()


def test_a_storage_in_a_queue_is_a_private_copy(publisher, subscriber):
    pub = publisher({"w": torch.ones(4)})
    storage = subscriber(pub).weights["w"].untyped_storage()
    sent = pickle.loads(bytes(ForkingPickler.dumps(storage)))
    pub.publish({"w": torch.zeros(4)})
    found = torch.empty(0).set_(sent, 0, (4,))
    assert found.tolist() == [1] * 4
    found.fill_(2)
    assert storage.nbytes() == sent.nbytes() and pub.weights["w"].tolist() == [0] * 4
