"""The processes of a storm: workers of a scheme, readers of an arena, and the trainer of that arena."""

from __future__ import annotations

import os
import time

import torch

import shmsync
from support.storms.board import COMPUTING, GO_ON, WAITING, Row
from support.storms.model import FINE, GLANCE, TORN, Weather, leaf

GLANCES = 32  # forwards that look at a few elements, for one that looks at all
# What a reader may meet while its publisher is dead, stopped or half way; it goes on.
EXPECTED = (shmsync.ArenaNotFound, shmsync.WriterDied, shmsync.Poisoned, shmsync.WriterBusy, shmsync.ClosedError)


def look(row, model):
    """Compute with the weights, and note what is the matter with them, if anything is."""
    row["phase"] = COMPUTING
    for each in range(GLANCES + 1):
        number, matter, _ = model(GLANCE if each < GLANCES else None)
        if matter != FINE:
            row["torn" if matter == TORN else "wrong"] += 1
        row["backwards"] += number < row["number"]
        row["number"] = number
    row["looks"] += 1
    row["phase"] = WAITING


def receive_on(path, index, scheme, pipe):
    """A worker of a scheme."""
    torch.set_num_threads(1)
    row, model = Row(path), Weather()
    row["pid"] = os.getpid()
    scheme.init_on_worker("policy", pipe=pipe, model=model, worker_idx=index)
    receiver = scheme.get_receiver()
    while row["command"] == GO_ON:
        receiver.receive(timeout=0.002)
        with torch.no_grad():
            look(row, model)
    scheme.shutdown()


def use(device):
    if device:
        from shmsync.memory import devices
        from support.devices.simulated import install

        install(devices)


def read_on(path, index, name, device):
    """A reader of an arena, which follows its trainers."""
    torch.set_num_threads(1)
    use(device)
    row, sub = Row(path), None
    row["pid"] = os.getpid()
    while row["command"] == GO_ON:
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
