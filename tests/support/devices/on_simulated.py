"""What tests, and their workers, do with an arena on the simulated device."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch

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


def end_trace_during_publish(state, file):
    """End a trace while the device has a publish to make, and look for that end until it has come."""
    zeros, ones = torch.zeros(8, device="cpu"), torch.ones(8, device="cpu")
    with everywhere(seed=4, longest=0.0005) as device, shmsync.Publisher({"t": zeros}, slots=2) as pub:
        writer = pub._writer.side._writer
        with pub.trace(file):
            gate = device.gate(pub._writer.arena.on_device.stream)
            pub.publish({"t": ones})
        under_way = writer.trace is not None
        gate.set()
        end = time.monotonic() + 30
        while writer.trace is not None and time.monotonic() < end:
            pass  # and hold the GIL: the device's thread must come to its end without it
        return under_way, writer.trace is None


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
