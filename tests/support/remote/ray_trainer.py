"""A process that is a driver of Ray, with actors and a sender to them: what a test may interrupt at any moment."""

from __future__ import annotations

import ray
import torch

from shmsync import RayTransport, RayWeightSyncScheme
from support.remote import ray_parts
from support.remote.storms import storm


def connect(state, address):
    torch.set_num_threads(1)
    ray.init(address, **ray_parts.OPTIONS)


def make_scheme(state):
    scheme = RayWeightSyncScheme(timeout=60.0, fan_out=state.fan_out)
    scheme.init_on_sender("policy", model=state.model, remote_collectors=state.actors)
    return scheme


def open_sender(state, fan_out, count):
    state.fan_out, state.model = fan_out, ray_parts.net()
    state.actors = ray_parts.start(RayWeightSyncScheme(fan_out=fan_out), count)
    state.scheme = make_scheme(state)
    state.sender = state.scheme.get_sender()


def open_transport(state, timeout):
    state.transport = RayTransport(state.actors[0], timeout=timeout)


def look(state):
    return ray_parts.ask(state.actors, "look")


def storm_of_beginnings(state, longest):
    """init_on_sender(), a send and shutdown(), interrupted; other errors."""

    def begin():
        scheme = make_scheme(state)
        scheme.get_sender().send()
        scheme.shutdown()

    return storm(begin, longest)


def relays(state):
    """How many actors are relays."""
    return len(ray_parts.actors_of_class("Relay"))
