"""What tests, and their workers, do with an arena on the simulated device."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch

import shmsync
from support.devices.simulated import Simulated, everywhere, installed


def attach_there(state, handle):
    state.everywhere = everywhere(seed=4, longest=0.0005)
    state.everywhere.__enter__()
    state.sub = shmsync.Subscriber(handle, worker=0)


def value_there(state):
    with state.sub.read() as section:
        return set(section.weights["t"].tolist())


def close_there(state):
    state.sub.close()
    state.everywhere.__exit__(None, None, None)


@contextmanager
def held_up(stream):
    """What the stream is given inside is done after it."""
    gate = threading.Event()
    stream.give(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


def stream_of(handle):
    """The arena's stream: a publisher commits there, and a subscriber's reads end there."""
    return (handle._writer.arena if isinstance(handle, shmsync.Publisher) else handle.arena).on_device.stream


def value(sub, **kwargs):
    """What a section sees; all elements are one value."""
    with sub.read(**kwargs) as section:
        (found,) = set(section.weights["t"].tolist())
        return section.version, found


def open_trainer_there(state, slots):
    """Weights on a device of this process, and an arena in the host's memory."""
    state.device = Simulated(6, longest=0.0005)
    state.installed = installed(state.device)
    state.installed.__enter__()
    with state.device.on(state.device.stream()):
        state.source = {"t": torch.full((1000,), 1.0, device=state.device.torch_device)}
        state.pub = shmsync.Publisher(state.source, slots=slots)
    return state.pub.handle


def begin_half_a_copy(state, value):
    """Publish; the device stands still when a half of the slot is written."""
    device, stream = state.device, state.device.stream()
    reached, copy = threading.Event(), device.copy

    def copy_half(stream, pieces):
        copy(stream, [(to, source, size // 2) for to, source, size in pieces])
        stream.give(reached.set)
        stream.give(threading.Event().wait)

    device.copy = copy_half
    with device.on(stream):
        state.source["t"].fill_(value)
        state.pub.publish()
    assert reached.wait(20)
