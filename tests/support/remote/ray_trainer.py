"""A process that is a driver of Ray, with actors and a sender to them: what a test may interrupt at any moment."""

from __future__ import annotations

import ray
import torch

from shmsync import RayActorTransport, RayModuleTransformScheme, RayTransport, RayWeightSyncScheme
from support.remote import ray_parts
from support.remote.storms import storm

KINDS = {
    "ray": (RayWeightSyncScheme, {}, "remote_collectors", ray_parts.Worker),
    "ray-fan-out": (RayWeightSyncScheme, {"fan_out": "node"}, "remote_collectors", ray_parts.Worker),
    "ray-module": (RayModuleTransformScheme, {}, "actors", ray_parts.ModuleActor),
}


def connect(state, address):
    torch.set_num_threads(1)
    ray.init(address, **ray_parts.OPTIONS)


def make_scheme(state):
    make, options, roster, _ = KINDS[state.kind]
    scheme = make(timeout=60.0, **options)
    scheme.init_on_sender("policy", model=state.model, **{roster: state.actors})
    return scheme


def open_sender(state, kind, count):
    make, options, _, actor = KINDS[kind]
    state.kind, state.model = kind, ray_parts.net()
    state.actors = ray_parts.start(make(**options), count, kind=actor)
    state.scheme = make_scheme(state)
    state.sender = state.scheme.get_sender()


def open_transport(state, timeout):
    kind = RayActorTransport if state.kind == "ray-module" else RayTransport
    state.transport = kind(state.actors[0], timeout=timeout)


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
