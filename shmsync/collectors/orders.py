"""Which worker has been told to fill which buffer, and which of them have.

INV: every step may be interrupted by a signal handler that raises, and done again. An order counts from one store into
`open` on; a worker that gets it twice obeys once, since serials only grow; a batch that is announced twice counts
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .fleet import Fleet, WorkerProcess
from .worker import BATCH, COLLECT


@dataclass
class Order:
    """To fill one buffer."""

    serial: int  # of all orders of a collector
    version: int  # the newest one when it was given
    arrived: int = 0  # when it was filled, counted; 0: not yet


class Orders:
    """The orders of a collector's workers. `open[worker][buffer]` is the last one of each buffer."""

    def __init__(self, fleet: Fleet, workers: int) -> None:
        self._fleet = fleet
        self.open: dict[int, dict[int, Order]] = {index: {} for index in range(workers)}
        self.serial = 0  # of the newest order
        self._arrivals = 0
        fleet.hear(BATCH, self._arrived)

    def give(self, index: int, buffer: int, version: int) -> None:
        """Order this buffer, whatever was ordered of it before."""
        self.serial += 1
        self.open[index][buffer] = Order(self.serial, version)
        self.tell(index)

    def tell(self, index: int) -> None:
        """Tell the worker what it has not been told yet."""
        member = self._fleet.members[index]
        waiting = [(order.serial, buffer) for buffer, order in self.open[index].items() if not order.arrived]
        for serial, buffer in sorted(waiting):
            if serial > member.told:
                member.tell(COLLECT, (buffer, serial))
                member.told = serial

    def filled(self, buffer: int) -> bool:
        """Have all workers done their last order of this buffer?"""
        return all(buffer in orders and orders[buffer].arrived > 0 for orders in self.open.values())

    def ready(self) -> list[tuple[int, int]]:
        """(worker, buffer) of each filled buffer, in the order of arrival."""
        found = [
            (o.arrived, index, buffer) for index, each in self.open.items() for buffer, o in each.items() if o.arrived
        ]
        return [(index, buffer) for _, index, buffer in sorted(found)]

    def _arrived(self, member: WorkerProcess, content: Any) -> None:
        buffer, serial = content
        member.delivered = True
        order = self.open[member.index].get(buffer)
        if order is not None and order.serial == serial and not order.arrived:
            self._arrivals += 1
            order.arrived = self._arrivals
