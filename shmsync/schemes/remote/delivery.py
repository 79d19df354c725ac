"""The weights of one send: workers fetch them from the weight server, or they travel by the network's own means.

The network's own means are an argument of the call (RPC) and the object store (Ray).
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from .location import Location
from .packed_weights import PackedWeights, Stamp
from .relay import RelayOptions, Unpublished
from .remote_carrier import Carrier
from .remote_requests import Call, Destination
from .weight_server import FetchTicket, WeightServer

APART = 1 << 16  # bytes from which on weights are fetched; fewer are in the call itself, or where the network puts them
EACH = 2 << 20  # bytes; larger ones are not fetched by each worker of another node, where they can come there once
_log = logging.getLogger("shmsync")


@dataclass(eq=False)
class Delivery:
    """What a carrier gives its transports and relays to send.

    Args:
        packed_weights: the weights. A call that may read them keeps this.
        ticket: to fetch them with; None: they go by the network's own means.
        start_by_network: makes a call that sends them by the network's own means: it calls start(payload), which sends
            the payload and gives the call.
        node_workers: the workers on each node, by node, where the network's own means take weights to a node once for
            all workers there.
    """

    packed_weights: PackedWeights
    ticket: FetchTicket | None
    start_by_network: Callable[[Callable[[Any], Call]], Call]
    node_workers: dict[str, weakref.WeakSet[Destination]] = field(default_factory=dict)

    def one_copy_per_node(self, worker: Destination, node: str | None) -> bool:
        """Should a worker on this node not fetch them, since they come to its node once for all who are there?"""
        if self.ticket is None or self.ticket.size <= EACH or node == self.ticket.weight_server.location.node:
            return False
        if node is None:  # not known yet
            return True
        self.node_workers.setdefault(node, weakref.WeakSet()).add(worker)
        return len(self.node_workers[node]) > 1

    def start(self, to: Destination, start: Callable[[Any], Call]) -> Call:
        """Begin a call with the ticket; without it for a destination that does not fetch weights."""
        if self.ticket is None or not to.fetches(self):
            return self.start_by_network(start)
        call = start(self.ticket)
        call.payload = (call.payload, self)
        return call


class DeliveryCarrier(Carrier):
    """Its payload is a Delivery; where that is not fetched, the weights are an argument of the call.

    Args:
        host: gives the address at which workers reach this process.
        where: gives the location of the calling process; it is called here and by workers.
    """

    shared_from: int | None = APART

    def __init__(self, host: Callable[[], str], where: Callable[[], Location]) -> None:
        self._host = host
        self._where = where
        self._server: WeightServer | None = None
        self._failed = False
        self._node_workers: dict[str, weakref.WeakSet[Destination]] = {}

    @override
    def payload(self, packed_weights: PackedWeights, deadline: float) -> Delivery:
        return self.ship(packed_weights, deadline, lambda start: start(packed_weights))

    def ship(
        self, packed_weights: PackedWeights, deadline: float, start_by_network: Callable[[Callable[[Any], Call]], Call]
    ) -> Delivery:
        """The delivery of packed weights, which has to arrive by the deadline."""
        memory = packed_weights.memory
        weight_server = None if memory is None else self._find_server()
        if memory is None or weight_server is None:
            return Delivery(packed_weights, None, start_by_network)
        number, label = weight_server.put(packed_weights), packed_weights.label._replace(starts=(0,))
        size, seconds = packed_weights.whole.nbytes, max(1.0, deadline - time.monotonic())
        ticket = FetchTicket(weight_server.at, number, label, size, memory.place, self._where, seconds)
        return Delivery(packed_weights, ticket, start_by_network, self._node_workers)

    def _find_server(self) -> WeightServer | None:
        of_parent = self._server is not None and self._server.pid != os.getpid()
        if (self._server is None or of_parent) and not self._failed:
            try:
                self._server = _server_at(self._host(), self._where())
            except OSError as error:
                self._server, self._failed = None, True
                _log.warning("workers cannot fetch weights from this process (%s); they go by slower means", error)
        return self._server

    @override
    def lone_call(self, worker: Any, payload: Delivery, options: RelayOptions, stamp: Stamp) -> Call:
        return payload.start(worker, lambda content: worker.ask(Unpublished(stamp, options, content)))

    @override
    def close(self) -> None:
        """Let the weight server end with its last user. Idempotent."""
        self._server = None


_servers: weakref.WeakValueDictionary[tuple[int, str, Location], WeightServer] = weakref.WeakValueDictionary()


def _server_at(host: str, location: Location) -> WeightServer:
    """The one of this process for that address; all senders share it."""
    key = os.getpid(), host, location
    return _servers.get(key) or _servers.setdefault(key, WeightServer(host, location))
