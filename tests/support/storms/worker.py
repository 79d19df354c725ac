"""The processes of a storm: workers of a scheme, readers of an arena, and the trainer of that arena.

Their model has weights whose every element can be computed again from one number.
"""

from __future__ import annotations

import ctypes
import time
from functools import lru_cache

import torch
from torch import nn

import shmsync

SIZES = (3, 64, 4096, 65536)  # elements: a tear of one update is most likely to be seen in the largest
PRIME = 65521  # so that every value is exact in float32
GO_ON, EXIT = range(2)  # commands to a worker
LOOKS = 8  # forwards in a row
# What a reader may meet while its publisher is dead, stopped or half way; it goes on.
EXPECTED = (shmsync.ArenaNotFound, shmsync.WriterDied, shmsync.Poisoned, shmsync.WriterBusy, shmsync.ClosedError)


@lru_cache(maxsize=64)
def leaf(number, index):
    """What this leaf holds in the weights of this number."""
    elements = torch.arange(SIZES[index], dtype=torch.int64)
    return ((elements * (index + 3) + number * 7919 + index * 104729) % PRIME).float()


class Weather(nn.Module):
    """Its forward returns (number, are all leaves those of this number?)."""

    def __init__(self, number=0):
        super().__init__()
        self.leaves = nn.ParameterList([leaf(number, index).clone() for index in range(len(SIZES))])
        self.register_buffer("number", torch.tensor([number]))

    def forward(self):
        number = int(self.number)
        return number, all(torch.equal(each.detach(), leaf(number, index)) for index, each in enumerate(self.leaves))


class Row(ctypes.Structure):
    """What a storm and one worker tell each other, in memory that both map: it stays when the worker is killed."""

    _fields_ = [(name, ctypes.c_int64) for name in ("command", "number", "mixed", "backwards")]


def look(row, model):
    """Compute with the weights, and note what is the matter with them, if anything is."""
    with torch.no_grad():
        for _ in range(LOOKS):
            number, whole = model()
            row.mixed += not whole
            row.backwards += number < row.number
            row.number = number


def receive_on(row, index, scheme, pipe):
    """A worker of a scheme."""
    torch.set_num_threads(1)
    model = Weather()
    scheme.init_on_worker("policy", pipe=pipe, model=model, worker_idx=index)
    receiver = scheme.get_receiver()
    while row.command == GO_ON:
        receiver.receive(timeout=0.002)
        look(row, model)
    scheme.shutdown()


def use(device):
    if device:
        from shmsync.memory import devices
        from support.devices.simulated import install

        install(devices)


def read_on(row, index, name, device):
    """A reader of an arena, which follows its trainers."""
    torch.set_num_threads(1)
    use(device)
    sub = None
    while row.command == GO_ON:
        try:
            if sub is None:
                found = shmsync.Subscriber(name, worker=index, follow=True, timeout=0.5)
                model, sub = found.bind(Weather()), found
            look(row, model)
            time.sleep(0.003)  # all of them must leave the machine some time
        except EXPECTED:
            time.sleep(0.002)
    if sub is not None:
        sub.close()


# Calls of support.worker.Worker: the trainer of an arena.


def make_publisher(state, name, slots, number, device):
    use(device)
    state.pub = shmsync.Publisher(Weather(number), name=name, slots=slots, max_readers=32)


def publish(state, how, number, timeout):
    if how == "update":
        with state.pub.update(wait="all", timeout=timeout) as weights:
            for index in range(4):
                weights["leaves", str(index)].copy_(leaf(number, index))
            weights["number"].fill_(number)
    else:
        weights = Weather(number)
        state.pub.publish(weights if how == "module" else weights.state_dict(), wait="all", timeout=timeout)


def close(state):
    state.pub.close()
