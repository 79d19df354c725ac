"""A carrier: everything that the sender of a scheme has to know about one kind of network.

How a worker is sent its weights is its transport's matter (RemoteTransport.start_call). The carrier packs them, waits
for answers, and with fan_out="node" finds out where workers run and speaks to the relay of each node. A relay gets the
weights once and publishes them into an arena there; by default it is one of the node's own workers.

docs/add-a-transport.md goes through these methods with an example.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from .location import Location, Site, here
from .packed_weights import PackedWeights
from .relay import RelayOptions
from .remote_requests import Call, Destination


class HostedRelay(Destination):
    """A relay in a worker's process, for networks on which that process takes several requests at a time."""

    def __init__(self, host: Destination) -> None:
        self.host = host


class Carrier(ABC):
    """One kind of network, for one sender or one transport."""

    def payload(self, packed_weights: PackedWeights, deadline: float) -> Any:
        """What is sent: made once for each send, and then given to every start_call() and relay_call().

        It may wait until the monotonic time `deadline`.
        """
        return packed_weights

    def wait(self, calls: Collection[Call], seconds: float) -> None:
        """Return when one of these calls is finished, or after `seconds`.

        By default they are asked again and again: often at first, then three times a millisecond.
        """
        end, pause = time.monotonic() + seconds, 0.00005
        while not any(call.finished() for call in calls) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.0003)

    def home(self) -> Location:
        """Where the sender runs."""
        return here()

    @abstractmethod
    def locate(self, worker: Any) -> Call:
        """Ask a worker, which is known by its transport, where it runs; the answer is a Location."""

    def start_relay(self, site: Site, members: Mapping[int, Any], options: RelayOptions) -> Destination:
        """A relay for a node; `members` are its workers that are not known to be dead."""
        return HostedRelay(members[min(members)])

    @abstractmethod
    def relay_call(self, relay: Any, payload: Any, options: RelayOptions) -> Call:
        """Let a relay publish weights; the answer is an Announcement. In a worker, publish_here() does it."""

    @abstractmethod
    def close_relay(self, relay: Any, session: str, *, until: float | None) -> None:
        """End what a relay has published for the sender's session; in a worker, close_here() does it.

        `until`: the sender sends no more, and this may wait until that monotonic time. None: it must not wait.
        """

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give back threads and connections. Idempotent."""
