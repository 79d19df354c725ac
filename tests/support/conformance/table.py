"""The schemes that the conformance suite runs over: each joins by one line of SCHEMES."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from torch import distributed

from shmsync.schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from support.conformance.fleet import PipeFleet
from support.conformance.fleet_processes import DistributedFleet, RPCFleet
from support.conformance.fleet_ray import RayFleet, RayModuleFleet

ALONE = {"groups": [[0], [1], [2]]}  # three workers, none of which shares anything with another
NOT_FANNED_OUT = {"fan_out": None}


class Ends(NamedTuple):
    """What a scheme gets to know one worker by, for tests that send nothing.

    sender, worker: what init_on_sender() and init_on_worker() get; transport: what create_transport() gets.
    name: of the argument that brings the workers.
    connected: what check_connection() says.
    """

    sender: dict[str, Any]
    worker: dict[str, Any]
    transport: Any
    name: str
    connected: Callable[[], bool] = lambda: True

    @property
    def contradiction(self) -> str:
        """What the error says when the sender gets num_workers=2 too."""
        return f"num_workers is 2 but there are 1 {self.name}"


def a_pipe() -> Ends:
    ours, theirs = multiprocessing.Pipe()
    return Ends({"pipes": [ours]}, {"pipe": theirs}, ours, "pipes")


def an_actor(name: str) -> Ends:
    ray = pytest.importorskip("ray", reason="this entry needs Ray, which shmsync[ray] brings")
    connected = ray.is_initialized if name == "remote_collectors" else lambda: False  # there is no actor
    return Ends({name: [None]}, {}, None, name, connected)


def an_rpc_worker() -> Ends:
    sender = {"collector_infos": [None], "collector_rrefs": [None], "collector_class": object}
    return Ends(sender, {}, (None, None, None), "collector_infos", lambda: False)


def a_rank() -> Ends:
    store = distributed.HashStore()
    sender, worker = {"store": store, "ranks": [1]}, {"store": store, "rank": 1}
    return Ends(sender, worker, (store, 1), "ranks", lambda: False)


class Entry(NamedTuple):
    """A scheme under test.

    make: makes one; takes the scheme's own options, such as `timeout=`.
    fleet: connects it with workers; what the tests need of it is in Fleet.
    alone: options with which each worker can be reached without the others.
    crew: the kind of workers it runs over; see the fixture `crews`.
    ends: gives Ends.
    """

    name: str
    make: Callable[..., Any]
    fleet: Any = PipeFleet
    alone: dict[str, Any] = {}  # noqa: RUF012
    crew: str = "forkserver"
    ends: Callable[[], Ends] = a_pipe


MP = Entry("mp", MultiProcessWeightSyncScheme)
SHM = Entry("shm", SharedMemWeightSyncScheme, alone=ALONE)
NONE = Entry("none", NoWeightSyncScheme)  # it sends nothing, so only what holds for every call holds for it

PIPES = [MP, SHM]


def remote(name: str, fleet: Any, ends: Any, make: Any, **nodes: Any) -> list[Entry]:
    """The scheme, and the same with fan-out. `nodes`: more of these, whose workers are on these nodes."""
    crew, fanned_out = name.split("-")[0], partial(make, fan_out="node")
    fleets = {name: fleet, f"{name}-fan-out": fleet}
    fleets |= {f"{name}-{kind}": partial(fleet, nodes=where) for kind, where in nodes.items()}
    return [
        Entry(each, make if each == name else fanned_out, fleet, NOT_FANNED_OUT, crew, ends)
        for each, fleet in fleets.items()
    ]


RAY = remote("ray", RayFleet, partial(an_actor, "remote_collectors"), RayWeightSyncScheme)
RAY_MODULE, *_ = remote("ray-module", RayModuleFleet, partial(an_actor, "actors"), RayModuleTransformScheme)
# Of workers on another node the first is the relay. With RPC it is the one that tests like to kill; a rank relays at
# its receive(), so there it is another, as tests look at its neighbours while they hold one.
RPC = remote("rpc", RPCFleet, an_rpc_worker, RPCWeightSyncScheme, relay=(None, "b", "b"))
DISTRIBUTED = remote("distributed", DistributedFleet, a_rank, DistributedWeightSyncScheme, relay=("b", "b", None))


def only(*entries: Entry) -> Any:
    """A mark: the test is about these schemes alone."""
    return pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in entries])
