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

ALONE = {"groups": [[0], [1], [2]]}  # three workers, none of which shares anything with another


class Ends(NamedTuple):
    """What a scheme gets to know one worker by, for tests that send nothing.

    sender, worker: what init_on_sender() and init_on_worker() get; transport: what create_transport() gets.
    connected: what check_connection() says.
    """

    sender: dict[str, Any]
    worker: dict[str, Any]
    transport: Any
    connected: Callable[[], bool] = lambda: True


def a_pipe() -> Ends:
    ours, theirs = multiprocessing.Pipe()
    return Ends({"pipes": [ours]}, {"pipe": theirs}, ours)


def an_actor(name: str) -> Ends:
    ray = pytest.importorskip("ray", reason="this entry needs Ray, which shmsync[ray] brings")
    connected = ray.is_initialized if name == "remote_collectors" else lambda: False  # there is no actor
    return Ends({name: [None]}, {}, None, connected)


def an_rpc_worker() -> Ends:
    sender = {"collector_infos": [None], "collector_rrefs": [None], "collector_class": object}
    return Ends(sender, {}, (None, None, None), lambda: False)


def a_rank() -> Ends:
    store = distributed.HashStore()
    sender, worker = {"store": store, "ranks": [1]}, {"store": store, "rank": 1}
    return Ends(sender, worker, (store, 1), lambda: False)


class Entry(NamedTuple):
    """A scheme under test.

    make: makes one; takes the scheme's own options, such as `timeout=`.
    alone: options with which each worker can be reached without the others.
    ends: gives Ends.
    """

    name: str
    make: Callable[..., Any]
    alone: dict[str, Any] = {}  # noqa: RUF012
    ends: Callable[[], Ends] = a_pipe


MP = Entry("mp", MultiProcessWeightSyncScheme)
SHM = Entry("shm", SharedMemWeightSyncScheme, alone=ALONE)
NONE = Entry("none", NoWeightSyncScheme)  # it sends nothing, so only what holds for every call holds for it

PIPES = [MP, SHM]


# Schemes for several machines; tests/remote/ sends over them.
RAY = Entry("ray", RayWeightSyncScheme, ends=partial(an_actor, "remote_collectors"))
RAY_MODULE = Entry("ray-module", RayModuleTransformScheme, ends=partial(an_actor, "actors"))
RPC = Entry("rpc", RPCWeightSyncScheme, ends=an_rpc_worker)
DISTRIBUTED = Entry("distributed", DistributedWeightSyncScheme, ends=a_rank)


def only(*entries: Entry) -> Any:
    """A mark: the test is about these schemes alone."""
    return pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in entries])
