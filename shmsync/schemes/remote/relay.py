"""A relay: gets each update once for its node, and publishes it into an arena that the node's workers attach to.

It is a separate process (Relay), or one of the node's workers relays beside its own work: publish_here() and
close_here() are what a sender calls in that worker's process.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ...engine.deadlines import deadline_after
from ...errors import ClosedError, ProtocolError, WriterBusy
from ...memory import leftovers
from ..arenas.publishers import ALL, ArenaOptions, Publishers, write
from .packed_weights import Announcement, Stamp, allow_views, stamp_of

_READERS = 256  # for which an arena has rows twice over; they are 128 bytes each


class RelayOptions(NamedTuple):
    """Of the arenas that relays make."""

    slots: int
    timeout: float
    partial: bool = False  # may updates lack leaves?


class Relay:
    """The publisher of one sender's models on one node."""

    def __init__(self, options: RelayOptions) -> None:
        self._options = options
        self._publishers = Publishers(ArenaOptions(options.slots, options.timeout, partial=options.partial))
        self._lock = threading.Lock()
        leftovers.sweep_some(math.inf)  # what the relay that this one replaces has left: random names do not recur
        allow_views(self)  # publishing copies

    def publish(self, weights: Any) -> Announcement:
        """Publish weights under their stamp. Raises as Publisher.publish() does, and ProtocolError without a stamp."""
        return self.publish_as(_stamp(weights), weights, deadline_after(None, self._options.timeout))

    def publish_as(self, stamp: Stamp, weights: Any, deadline: float) -> Announcement:
        """Publish weights of this process under this stamp, unless it has newer ones already."""
        with self._lock:
            model_id, version = stamp.model_id, stamp.version
            if self._publishers.version(model_id) < version:  # else this message came late, and there is newer
                plan = self._publishers.plan(model_id, weights, [ALL], version, _READERS)
                write(plan, version, deadline)
            publisher = self._publishers.publisher(model_id, ALL)
            return Announcement(stamp._replace(version=publisher.version), publisher.handle)

    def version(self, model_id: str) -> int:
        """The newest version of a model here; 0: none yet."""
        return self._publishers.version(model_id)

    def close(self) -> None:
        """End the arenas. Idempotent."""
        self._publishers.close()


def _stamp(weights: Any) -> Stamp:
    stamp = stamp_of(weights)
    if stamp is None:
        raise ProtocolError("a relay publishes what a sender of shmsync sent, and these weights have no stamp")
    return stamp


_hosted: dict[tuple[str, str], Relay] = {}  # by session and model, in a worker that is its node's relay
_ended: set[str] = set()  # sessions; a message of one may still come
_hosted_lock = threading.Lock()


def publish_here(options: RelayOptions, weights: Any) -> Announcement:
    """Publish a sender's weights for the workers of this node, in a worker that the sender made their relay."""
    stamp = _stamp(weights)
    with _hosted_lock:
        if stamp.session in _ended:
            raise ClosedError("the sender of these weights was shut down; make a new one")
        # Those of a trainer that was started again.
        others = _take_out(lambda session, model_id: model_id == stamp.model_id and session != stamp.session)
        relay = _hosted.get((stamp.session, stamp.model_id))
        if relay is None:
            relay = _hosted[stamp.session, stamp.model_id] = Relay(options)
    _close(others)
    return relay.publish(weights)


def close_here(session: str, *, ended: bool) -> None:
    """End what this process relays for a sender. `ended`: that sender sends no more."""
    with _hosted_lock:
        if ended:
            _ended.add(session)
        relays = _take_out(lambda of, _: of == session)
    _close(relays)


def _take_out(which: Callable[[str, str], bool]) -> list[Relay]:
    return [_hosted.pop(key) for key in list(_hosted) if which(*key)]


def _close(relays: Iterable[Relay]) -> None:
    for relay in relays:
        with contextlib.suppress(WriterBusy):  # it publishes, or waits for a reader: its arenas end with it
            relay.close()
