"""The schemes that the conformance suite runs over: each joins by one line of SCHEMES."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
from shmsync.examples.socket_transport import SocketWeightSyncScheme
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
from support.conformance.fleet_processes import DistributedFleet, RPCFleet, SocketFleet
from support.conformance.fleet_ray import RayFleet, RayModuleFleet

ALONE = {"groups": [[0], [1], [2]]}  # three workers, none of which shares anything with another
NOT_FANNED_OUT = {"fan_out": None}


class Ends(NamedTuple):
    """What a scheme gets to know one worker by, for tests that send nothing.

    sender, worker: what init_on_sender() and init_on_worker() get; transport: what create_transport() gets.
    needed, contradiction: what the error says when the sender gets nothing, or num_workers=2 too.
    connected: what check_connection() says.
    """

    sender: dict[str, Any]
    worker: dict[str, Any]
    transport: Any
    needed: str
    contradiction: str
    connected: Callable[[], bool] = lambda: True


@contextlib.contextmanager
def a_pipe() -> Iterator[Ends]:
    ours, theirs = multiprocessing.Pipe()
    sender, worker = {"pipes": [ours]}, {"pipe": theirs}
    yield Ends(sender, worker, ours, "pipes must be given", "num_workers is 2 but there are 1 pipes")
    ours.close()
    theirs.close()


@contextlib.contextmanager
def an_actor(name: str) -> Iterator[Ends]:
    ray = pytest.importorskip("ray", reason="this entry needs Ray, which shmsync[ray] brings")
    contradiction = f"num_workers is 2 but there are 1 {name}"
    connected = ray.is_initialized if name == "remote_collectors" else lambda: False  # there is no actor
    yield Ends({name: [None]}, {}, None, f"{name} must be given", contradiction, connected)


@contextlib.contextmanager
def an_rpc_worker() -> Iterator[Ends]:
    sender = {"collector_infos": [None], "collector_rrefs": [None], "collector_class": object}
    contradiction = "num_workers is 2 but there are 1 collector_infos"
    yield Ends(sender, {}, (None, None, None), "collector_infos must be given", contradiction, lambda: False)


@contextlib.contextmanager
def a_rank() -> Iterator[Ends]:
    store = distributed.HashStore()
    sender, worker = {"store": store, "ranks": [1]}, {"store": store, "rank": 1}
    needed = "give ranks= or num_workers"
    yield Ends(sender, worker, (store, 1), needed, "num_workers is 2 but there are 1 ranks", lambda: False)


@contextlib.contextmanager
def an_address() -> Iterator[Ends]:
    contradiction = "num_workers is 2 but there are 1 addresses"
    yield Ends({"addresses": [None]}, {}, None, "addresses must be given", contradiction)


class Entry(NamedTuple):
    """A scheme under test.

    make: makes one; takes the scheme's own options, such as `timeout=`.
    fleet: connects it with workers; what the tests need of it is in Fleet.
    alone: options with which each worker can be reached without the others.
    crews: the kinds of workers it runs over; see the fixture `crew`.
    ends: gives Ends, in a with statement.
    """

    name: str
    make: Callable[..., Any]
    fleet: Any = PipeFleet
    alone: dict[str, Any] = {}  # noqa: RUF012
    crews: tuple[str, ...] = ("forkserver", "fork", "spawn")
    ends: Callable[[], Any] = a_pipe

    @property
    def scheme(self) -> Any:
        """Its class, which other entries may share."""
        return self.make.func if isinstance(self.make, partial) else self.make


MP = Entry("mp", MultiProcessWeightSyncScheme)
SHM = Entry("shm", SharedMemWeightSyncScheme, alone=ALONE)
NONE = Entry("none", NoWeightSyncScheme)  # it sends nothing, so only what holds for every call holds for it

PIPES = [
    MP,
    Entry("mp-tensordict", partial(MultiProcessWeightSyncScheme, "tensordict")),
    SHM,
    Entry("shm-two-slots", partial(SharedMemWeightSyncScheme, strategy="state_dict", slots=2), alone=ALONE),
    Entry("shm-optimistic", partial(SharedMemWeightSyncScheme, consistency="optimistic"), alone=ALONE),
]


def remote(name: str, fleet: Any, ends: Any, make: Any, **nodes: Any) -> list[Entry]:
    """The scheme, and the same with fan-out. `nodes`: more of these, whose workers are on these nodes."""
    crew, fanned_out = name.split("-")[0], partial(make, fan_out="node")
    fleets = {name: fleet, f"{name}-fan-out": fleet}
    fleets |= {f"{name}-{kind}": partial(fleet, nodes=where) for kind, where in nodes.items()}
    return [
        Entry(each, make if each == name else fanned_out, fleet, NOT_FANNED_OUT, (crew,), ends)
        for each, fleet in fleets.items()
    ]


RAY = remote("ray", RayFleet, partial(an_actor, "remote_collectors"), RayWeightSyncScheme)
RAY_MODULE, *_ = remote("ray-module", RayModuleFleet, partial(an_actor, "actors"), RayModuleTransformScheme)
# Of workers on another node the first is the relay. With RPC it is the one that tests like to kill; a rank relays at
# its receive(), so there it is another, as tests look at its neighbours while they hold one.
RPC = remote("rpc", RPCFleet, an_rpc_worker, RPCWeightSyncScheme, relay=(None, "b", "b"))
DISTRIBUTED = remote("distributed", DistributedFleet, a_rank, DistributedWeightSyncScheme, relay=("b", "b", None))
SOCKET = remote("socket", SocketFleet, an_address, SocketWeightSyncScheme, relay=("b", "b", None))  # an example

SCHEMES = [*PIPES, *RAY, RAY_MODULE, *RPC, *DISTRIBUTED, *SOCKET]


def only(*entries: Entry) -> Any:
    """A mark: the test is about these schemes alone."""
    return pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in entries])


over_pipes = only(*PIPES)  # a mark: the test is about pipes, or about what only schemes over pipes do
remotely = only(*SCHEMES[len(PIPES) :])


def start_methods(*names: str) -> Any:
    """A mark: where workers are started by multiprocessing, these start methods will do, as the test kills many or
    depends on nothing else."""
    return pytest.mark.parametrize("crew", [*names, "ray", "rpc", "distributed", "socket"], indirect=True)


in_processes = start_methods("forkserver")  # a mark: any start method will do
