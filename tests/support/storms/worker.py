"""The processes of a storm: workers of a scheme, readers of an arena, and the trainer of that arena."""

from __future__ import annotations

import ctypes
import time

import torch

import shmsync
from support.storms.model import FINE, GLANCE, TORN, Weather, leaf

GO_ON, EXIT = range(2)  # commands to a worker
WAITING, COMPUTING = range(2)  # phases
GLANCES = 32  # forwards that look at a few elements, for one that looks at all
# What a reader may meet while its publisher is dead, stopped or half way; it goes on.
EXPECTED = (shmsync.ArenaNotFound, shmsync.WriterDied, shmsync.Poisoned, shmsync.WriterBusy, shmsync.ClosedError)


class Row(ctypes.Structure):
    """What a storm and one worker tell each other, in memory that both map: it stays when the worker is killed."""

    _fields_ = [(name, ctypes.c_int64) for name in ("command", "phase", "number", "torn", "wrong", "backwards")]


def look(row, model):
    """Compute with the weights, and note what is the matter with them, if anything is."""
    row.phase = COMPUTING
    for each in range(GLANCES + 1):
        number, matter = model(GLANCE if each < GLANCES else None)
        row.torn += matter == TORN
        row.wrong += matter not in (FINE, TORN)
        row.backwards += number < row.number
        row.number = number
    row.phase = WAITING


def receive_on(row, index, scheme, pipe):
    """A worker of a scheme."""
    torch.set_num_threads(1)
    model = Weather()
    scheme.init_on_worker("policy", pipe=pipe, model=model, worker_idx=index)
    receiver = scheme.get_receiver()
    while row.command == GO_ON:
        receiver.receive(timeout=0.002)
        with torch.no_grad():
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
            with torch.no_grad():
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
