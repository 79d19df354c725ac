"""Fan-out: one copy of the weights goes to each node, and all of its workers attach to it there.

On the sender's own node the sender publishes itself. On every other node a relay does: a separate process, or one of
the node's workers. A relay that died is replaced during the send that found it dead; that send still reports it.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from ...engine.outcome import Failure
from ...errors import ArenaNotFound, ClosedError, WriterDied
from .location import Location, Site
from .packed_weights import Announcement, Packer, Stamp
from .relay import Relay, RelayOptions
from .remote_carrier import Carrier
from .remote_requests import Answered, Call, Destination, Failed, Gone, RemoteSend, Step
from .remote_transport import RemoteTransport

_CLOSING = 2.0  # seconds that close() waits at most, for all relays together
Workers = Mapping[int, RemoteTransport]


class FanOut:
    """The relays of one sender.

    Args:
        carrier: reaches workers and relays.
        options: of the arenas.
        packer: packs the sender's weights, and has the session by which workers know what they relay for it.
    """

    def __init__(self, carrier: Carrier, options: RelayOptions, packer: Packer) -> None:
        self._carrier = carrier
        self._options = options
        self._packer = packer
        self._local: Relay | None = None  # the sender publishes for its own node
        self._relays: dict[Site, Destination] = {}
        self._closed = False
        # At exit what was registered last comes first. The carrier has imported its network before, so that still runs.
        atexit.register(self.close)

    @cached_property
    def home(self) -> Location:
        """Where the sender runs."""
        return self._carrier.home()

    def version(self, model_id: str) -> int:
        """The newest version of a model on the sender's own node. An interrupted send may have left it there."""
        return 0 if self._local is None else self._local.version(model_id)

    # The workers of each node.

    def find_locations(self, sending: RemoteSend, chosen: Workers, everybody: Workers, deadline: float) -> None:
        """Find out on which nodes workers are, and end the relays of nodes that have none any more.

        Raises ValueError when some are chosen, but not all, of those that share an arena.
        """
        self._ask_locations(sending, chosen, deadline)
        if chosen.keys() != everybody.keys():
            self._ask_locations(RemoteSend(self._carrier.wait), everybody, deadline)
            _check_whole_nodes(chosen, everybody)
        if all(worker.location is not None for worker in everybody.values()):
            for site in self._relays.keys() - _by_site(everybody):
                self._close_relay(self._relays.pop(site))

    def _ask_locations(self, sending: RemoteSend, workers: Workers, deadline: float) -> None:
        def save(index: int, worker: RemoteTransport, result: Any) -> None:
            if isinstance(result, Location):
                worker.location = result
            else:
                sending.unreached.discard(index)  # the outcome tells more

        asked = {index: worker for index, worker in workers.items() if worker.location is None}
        now = time.monotonic()
        # The others wait no longer for it than a quarter of the time, and when it was late before, hardly at all.
        late_before = all(worker.call is not None for worker in asked.values())
        hardly = late_before and len(asked) < len(workers) and deadline < math.inf
        share = 0.05 if hardly else 0.25 * (deadline - now)
        for index, worker in asked.items():
            sending.unreached.add(index)
            start, then = partial(self._locate, worker), partial(save, index, worker)
            sending.add(Step(index, worker, start, then, record="failures"))
        if asked:
            sending.finish(min(deadline, now + share))
        # A worker that answers later than this has missed this send.
        sending.unreached.difference_update([index for index, worker in workers.items() if worker.location is not None])

    def _locate(self, worker: RemoteTransport) -> Call:
        return self._carrier.locate(worker) if worker.connected else Answered(self.home)

    # The send.

    def deliver(
        self,
        sending: RemoteSend,
        stamp: Stamp,
        weights: Any,
        workers: Workers,
        accept: Callable[[], None],
        deadline: float,
        *,
        whole: Any,
    ) -> None:
        """Start sending to the workers that are located; `accept` is called once publishing cannot fail any more.

        `whole`: all weights, where `weights` may be a part of them: what goes where there is no arena yet, perhaps.

        Raises what Publisher.publish() raises on the sender's own node, before anything left it.
        """
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")
        home, far = Site.of(self.home), _by_site(workers)
        near = far.pop(home, None)
        payload = None
        if far:
            payload = self._carrier.payload(self._packer.pack(whole, stamp.model_id, stamp.version), deadline)
        announcement = None
        if near is not None:
            if self._local is None:
                self._local = Relay(self._options)
            first = not self._local.version(stamp.model_id)
            announcement = self._local.publish_as(stamp, whole if first else weights, deadline)
        accept()
        for index, worker in (near or {}).items():
            sending.add(Step(index, worker, partial(worker.post, announcement)))
        for site, members in far.items():
            self._relay(sending, site, members, payload, restarts=1)

    def _relay(self, sending: RemoteSend, site: Site, members: Workers, payload: Any, *, restarts: int) -> None:
        sending.unreached.update(members.keys() - set(sending.outcome.done))
        relay = self._relays.get(site)
        if relay is not None and relay.host is not None and _host_of(relay, members) is None:
            self._close_relay(relay)  # its worker has left
            relay = None
        if relay is None:
            relay = self._relays[site] = self._carrier.start_relay(site, members, self._options)
        host = _host_of(relay, members)

        def drop(how: str) -> None:
            sending.outcome.dead[site.relay_name] = how
            self._relays.pop(site)
            if host is not None and members[host].dead:  # else its own step will tell
                sending.outcome.dead[host] = how
                sending.unreached.discard(host)

        def lost(how: str) -> bool:
            """Let another relay take its place, once for each send."""
            if self._relays.get(site) is not relay:
                return True  # another worker has said so before
            if not restarts:
                return False
            drop(how)
            left = {index: member for index, member in members.items() if index != host}
            if left:
                self._relay(sending, site, left, payload, restarts=restarts - 1)
            return True

        def cannot_attach(index: int, failure: Any) -> bool:
            """Was the relay dead before this worker had attached to its arena?"""
            if index == host:
                return False  # it lives
            gone = isinstance(failure, Failure) and isinstance(failure.exception(), (WriterDied, ArenaNotFound))
            return gone and lost("it died before all workers of its node had attached")

        def then(result: Any) -> None:
            if isinstance(result, Announcement):
                sending.unreached.difference_update(members)
                for index, worker in members.items():
                    start = partial(worker.post, result)
                    sending.add(Step(index, worker, start, forgive=partial(cannot_attach, index)))
            elif isinstance(result, Gone):
                if host is not None:
                    members[host].dead = result.final
                for member in members.values():
                    member.location = None  # after the loss of a node, its workers may start elsewhere
                if not lost(str(result)):
                    drop(str(result))
            elif isinstance(result, Failed):
                sending.outcome.failed[site.relay_name] = result.failure

        start = partial(self._carrier.relay_call, relay, payload, self._options)
        sending.add(Step(site.relay_name, relay, start, then, record=False))

    def _close_relay(self, relay: Destination, *, until: float | None = None) -> None:
        self._carrier.close_relay(relay, self._packer.session, until=until)

    def close(self) -> None:
        """End every relay, and every arena. Idempotent."""
        self._closed = True
        until = time.monotonic() + min(_CLOSING, self._options.timeout)
        for site, relay in list(self._relays.items()):
            self._close_relay(relay, until=until)
            self._relays.pop(site, None)
        if self._local is not None:
            self._local.close()
        atexit.unregister(self.close)


def _host_of(relay: Destination, members: Workers) -> int | None:
    """Which of these workers the relay is part of."""
    return next((index for index, member in members.items() if member is relay.host), None)


def _by_site(workers: Workers) -> dict[Site, dict[int, RemoteTransport]]:
    """Workers whose location is known, by where they can share an arena."""
    sites: dict[Site, dict[int, RemoteTransport]] = {}
    for index, worker in workers.items():
        if worker.location is not None:
            sites.setdefault(Site.of(worker.location), {})[index] = worker
    return sites


def _check_whole_nodes(chosen: Workers, everybody: Workers) -> None:
    for site, members in _by_site(everybody).items():
        wanted = sorted(members.keys() & chosen.keys())
        if wanted and len(wanted) < len(members):
            raise ValueError(
                f"workers {sorted(members)} share one arena on node {site.node}, so a send cannot reach {wanted} "
                "alone; send to all of them, or use fan_out=None"
            )
