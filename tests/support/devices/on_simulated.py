"""What tests, and their workers, do with an arena on the simulated device."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import shmsync
from support.devices.simulated import everywhere


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
