"""A tensor of an arena in a queue or pipe of torch.multiprocessing: the other process gets a private copy."""

from __future__ import annotations

import pickle
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from support.processes import PATIENCE


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    resource_sharer.stop()  # which hands out tensors that were sent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.register_buffer("noise", torch.ones(4))


OBJECTS = {
    "sub.weights": lambda sub, pub, worker, trainer: sub.weights["weight"],
    "slice": lambda sub, pub, worker, trainer: sub.weights["weight"][1:],
    "pub.weights": lambda sub, pub, worker, trainer: pub.weights["weight"],
    "bound parameter": lambda sub, pub, worker, trainer: worker.weight,
    "bound buffer": lambda sub, pub, worker, trainer: worker.noise,
    "adopted parameter": lambda sub, pub, worker, trainer: trainer.weight,
}


def expect_ones(tensors):
    """Check tensors that came from another process, and that they can be written."""
    assert all(each.eq(1).all() for each in tensors)
    for each in tensors:  # some are tied
        each.detach().zero_()


@pytest.mark.parametrize("what", OBJECTS)
@torch.no_grad()
def test_a_queue_gets_a_private_copy(what, publisher, subscriber):
    trainer, worker = Net(), Net()
    pub = publisher(trainer)
    pub.adopt(trainer)
    sub = subscriber(pub)
    sub.bind(worker, guard=False)
    value = OBJECTS[what](sub, pub, worker, trainer)
    found = pickle.loads(bytes(ForkingPickler.dumps(value)))
    assert type(found) is type(value) and found.shape == value.shape
    assert found.untyped_storage().nbytes() == value.nbytes
    with pub.update() as weights:
        weights["weight"].fill_(2.0)
        trainer.noise.fill_(2.0)
    sub.refresh()
    assert found.eq(1).all() and value.eq(2).all(), "the copy stays, and what was sent is still in the arena"
    found.add_(1.0)  # in an arena this is a SIGSEGV


def test_arguments_of_a_process_arrive(publisher):
    pub = publisher(Net())
    args = (list(pub.weights.values(True, True)),)
    child = torch.multiprocessing.get_context("forkserver").Process(target=expect_ones, args=args)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
