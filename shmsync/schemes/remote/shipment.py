"""Weights of one send, in both ways in which they may travel: fetched from our depot, or by the network's own means."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from .depot import Depot
from .parcel import Parcel
from .place import Place
from .requests import Call, Destination
from .ticket import Ticket

APART = 1 << 16  # bytes from which on weights are fetched; fewer are in the call itself, or where the network puts them
EACH = 2 << 20  # bytes; larger ones are not fetched by each worker of another node, where they can come there once
_log = logging.getLogger("shmsync")


class Shipment:
    """What a carrier gives its transports and relays to send.

    Args:
        parcel: the weights. A call that may read them keeps this.
        ticket: to fetch them with; None: they go by the network's own means.
        own: makes a call that sends them by the network's own means; gets what starts it with a payload.
        crowds: who is on which node, where the network's own means take weights to a node once for all who are there.
    """

    def __init__(
        self,
        parcel: Parcel,
        ticket: Ticket | None,
        own: Callable[[Callable[[Any], Call]], Call],
        crowds: dict[str, set[int]] | None = None,
    ) -> None:
        self.parcel = parcel
        self.ticket = ticket
        self.own = own
        self._crowds = {} if crowds is None else crowds

    def in_a_crowd(self, who: int, node: str | None) -> bool:
        """Should a worker on this node not fetch them, since they come to its node once for all who are there?"""
        if self.ticket is None or self.ticket.size <= EACH or node == self.ticket.depot.maker.node:
            return False
        if node is None:  # not known yet
            return True
        self._crowds.setdefault(node, set()).add(who)
        return len(self._crowds[node]) > 1

    def start(self, to: Destination, start: Callable[[Any], Call]) -> Call:
        """Begin a call with the ticket, unless it was of no use to this destination before."""
        if self.ticket is None or to.out_of_reach is not None:
            return self.own(start)
        call = start(self.ticket)
        call.payload = (call.payload, self)
        return call


class Shipping:
    """Makes the shipments of one carrier, and keeps the depot.

    Args:
        host: gives the address at which workers reach this process.
        where: gives the location of the calling process; it is called here and by workers.
    """

    def __init__(self, host: Callable[[], str], where: Callable[[], Place]) -> None:
        self._host = host
        self._where = where
        self._depot: Depot | None = None
        self._failed = False
        self._crowds: dict[str, set[int]] = {}

    def ship(self, parcel: Parcel, deadline: float, own: Callable[[Callable[[Any], Call]], Call]) -> Shipment:
        """The shipment of a parcel, which has to arrive by the deadline."""
        depot = self._find_depot() if parcel.memory is not None else None
        if depot is None:
            return Shipment(parcel, None, own)
        assert parcel.memory is not None
        seconds = max(1.0, deadline - time.monotonic()) if math.isfinite(deadline) else math.inf
        label = parcel.label._replace(starts=(0,))
        size = parcel.whole.nbytes
        ticket = Ticket(depot.at, depot.put(parcel), label, size, parcel.memory.place, self._where, seconds)
        return Shipment(parcel, ticket, own, self._crowds)

    def _find_depot(self) -> Depot | None:
        if self._depot is not None and self._depot.pid != os.getpid():
            self._depot = None  # of the process that this one was forked from
        if self._depot is None and not self._failed:
            try:
                self._depot = _depot_at(self._host(), self._where())
            except OSError as error:
                self._failed = True
                _log.warning("workers cannot fetch weights from this process (%s); they go by slower means", error)
        return self._depot

    def close(self) -> None:
        """Let the depot end with its last user. Idempotent."""
        self._depot = None


_depots: weakref.WeakValueDictionary[tuple[int, str, Place], Depot] = weakref.WeakValueDictionary()


def _depot_at(host: str, maker: Place) -> Depot:
    """The one of this process for that address; all senders share it."""
    key = os.getpid(), host, maker
    found = _depots.get(key)
    if found is None:
        found = _depots.setdefault(key, Depot(host, maker))
    return found
