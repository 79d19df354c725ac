"""Fan-out: one copy of the weights goes to each node, and all of its workers attach to it there.

On the sender's own node the sender publishes itself. On every other node a relay does: an actor, or one of the node's
own workers. A relay that died is replaced during the send that found it dead; that send still says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from ...engine.outcome import Failure
from ...errors import ArenaNotFound, ClosedError, WriterDied
from .parcel import Announcement, Packer, Parcel, Stamp
from .place import Place, here
from .relay import Relay, RelayOptions
from .requests import Call, Delivery, Destination, Failed, Gone


class Site(NamedTuple):
    """Workers that can share an arena: those of one node, and of one user and process namespace on it."""

    node: str
    boot_id: str
    pid_namespace: int
    user: int

    @classmethod
    def of(cls, place: Place) -> Site:
        """Where a process belongs."""
        return cls(*place[:4])

    @property
    def relay_name(self) -> str:
        """What errors call its relay."""
        return f"the relay on node {self.node}"


class FanOut:
    """The relays of one sender. Kinds of transports derive from it."""

    def __init__(self, options: RelayOptions) -> None:
        self.options = options
        self._local: Relay | None = None
        self._relays: dict[Site, Destination] = {}
        self._home: Site | None = None
        self._closed = False

    # What the kinds of transports do differently.

    def home(self) -> Place:
        """Where the sender runs."""
        return here()

    def locate(self, worker: Destination) -> Call:
        """Ask a worker where it runs; the answer is a Place."""
        raise NotImplementedError

    def make_relay(self, site: Site, members: Mapping[int, Destination]) -> Destination:
        """A relay for a node; `members` are its workers that are not known to be dead."""
        raise NotImplementedError

    def host_of(self, relay: Destination, members: Mapping[int, Destination]) -> int | None:
        """Which of these workers the relay is part of; None: it is a process of its own."""
        return None

    def serves(self, relay: Destination, members: Mapping[int, Destination]) -> bool:
        """Can this relay go on, with these workers alive?"""
        return True

    def relay_call(self, relay: Destination, payload: Any) -> Call:
        """Give a relay new weights; the answer is an Announcement."""
        return relay.post(payload)

    def close_relay(self, relay: Destination, *, ended: bool) -> None:
        """End a relay and its arenas. `ended`: the sender sends no more, and may wait a moment for it."""

    # The send.

    def version(self, model_id: str) -> int:
        """The newest version of a model on the sender's own node. An interrupted send may have left it there."""
        return 0 if self._local is None else self._local.version(model_id)

    def deliver(
        self,
        delivery: Delivery,
        packer: Packer,
        payload_of: Callable[[Parcel], Any],
        stamp: Stamp,
        weights: Any,
        sites: Mapping[Site, Mapping[int, Destination]],
        accept: Callable[[], None],
        deadline: float,
    ) -> None:
        """Start sending to whole nodes. Raises what Publisher.publish() raises on the sender's own node, before
        anything left it; `accept` is called when nothing of that kind can happen any more."""
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")
        if self._home is None:
            self._home = Site.of(self.home())
        home = self._home
        far = {site: members for site, members in sites.items() if site != home}
        payload = payload_of(packer.pack(weights, stamp.model_id, stamp.version)) if far else None
        announcement = None
        if home in sites:
            if self._local is None:
                self._local = Relay(self.options)
            announcement = self._local.publish_as(stamp, weights, deadline)
        accept()
        if announcement is not None:
            for index, worker in sites[home].items():
                delivery.ask(index, worker, partial(worker.post, announcement))
        for site, members in far.items():
            self._relay(delivery, site, members, payload, restarts=1)

    def _relay(
        self, delivery: Delivery, site: Site, members: Mapping[int, Destination], payload: Any, *, restarts: int
    ) -> None:
        delivery.unreached.update(members.keys() - set(delivery.outcome.done))
        relay = self._relays.get(site)
        if relay is not None and not self.serves(relay, members):
            self.close_relay(relay, ended=False)
            relay = None
        if relay is None:
            relay = self._relays[site] = self.make_relay(site, members)

        def drop(how: str) -> None:
            delivery.outcome.dead[site.relay_name] = how
            self._relays.pop(site)
            host = self.host_of(relay, members)
            if host is not None and members[host].dead:  # else its own step will tell
                delivery.outcome.dead[host] = how
                delivery.unreached.discard(host)

        def lost(how: str) -> bool:
            """Let another relay take its place, once for each send."""
            if self._relays.get(site) is not relay:
                return True  # another worker has said so before
            if not restarts:
                return False
            drop(how)
            host = self.host_of(relay, members)
            left = {index: member for index, member in members.items() if index != host}
            if left:
                self._relay(delivery, site, left, payload, restarts=restarts - 1)
            return True

        def cannot_attach(index: int, failure: Any) -> bool:
            """Was the relay dead before this worker had attached to its arena?"""
            if index == self.host_of(relay, members):
                return False  # it lives
            gone = isinstance(failure, Failure) and isinstance(failure.exception(), (WriterDied, ArenaNotFound))
            return gone and lost("it died before all workers of its node had attached")

        def then(result: Any) -> None:
            if isinstance(result, Announcement):
                delivery.unreached.difference_update(members)
                for index, worker in members.items():
                    delivery.ask(index, worker, partial(worker.post, result), forgive=partial(cannot_attach, index))
            elif isinstance(result, Gone):
                host = self.host_of(relay, members)
                if host is not None:
                    members[host].dead = result.final
                for member in members.values():
                    member.place = None  # with a whole node, its workers may come back elsewhere
                if not lost(str(result)):
                    drop(str(result))
            elif isinstance(result, Failed):
                delivery.outcome.failed[site.relay_name] = result.failure

        start = partial(self.relay_call, relay, payload)
        delivery.ask(site.relay_name, relay, start, then=then, record=False)

    def retire(self, sites: Collection[Site]) -> None:
        """End the relays of nodes that have no worker any more, when these are all that have."""
        for site in self._relays.keys() - sites:
            self.close_relay(self._relays.pop(site), ended=False)

    def close(self) -> None:
        """End every relay, and every arena. Idempotent."""
        self._closed = True
        for site, relay in list(self._relays.items()):
            self.close_relay(relay, ended=True)
            self._relays.pop(site, None)
        if self._local is not None:
            self._local.close()


class HostedFanOut(FanOut):
    """The relay of a node is the first of its workers that lives. Kinds of transports derive from it.

    Args:
        session: of the sender, by which workers know what they relay for it.
    """

    def __init__(self, options: RelayOptions, session: str) -> None:
        super().__init__(options)
        self._session = session

    def host(self, relay: Destination) -> Destination:
        """The worker that a relay is part of."""
        return relay

    def host_of(self, relay: Destination, members: Mapping[int, Destination]) -> int | None:
        """As in FanOut."""
        host = self.host(relay)
        return next((index for index, member in members.items() if member is host), None)

    def serves(self, relay: Destination, members: Mapping[int, Destination]) -> bool:
        """As in FanOut."""
        return self.host_of(relay, members) is not None


def find_places(fan_out: FanOut, delivery: Delivery, workers: Mapping[int, Destination], deadline: float) -> None:
    """Ask those workers where they run who were not asked yet."""

    def save(index: int, worker: Destination, result: Any) -> None:
        if isinstance(result, Place):
            worker.place = result
        else:
            delivery.unreached.discard(index)  # the outcome tells more

    asked = {index: worker for index, worker in workers.items() if worker.place is None}
    now = time.monotonic()
    # The others wait no longer for it than a quarter of the time, and when it was late before, hardly at all.
    share = 0.25 * (deadline - now) if any(worker.call is None for worker in asked.values()) else 0.05
    for index, worker in asked.items():
        delivery.unreached.add(index)
        delivery.ask(
            index, worker, partial(fan_out.locate, worker), then=partial(save, index, worker), record="failures"
        )
    if asked:
        delivery.finish(min(deadline, now + share))
    # Whoever answers later than this has missed this send.
    delivery.unreached.difference_update([index for index, worker in workers.items() if worker.place is not None])


def sites_of(workers: Mapping[int, Destination]) -> dict[Site, dict[int, Destination]]:
    """Workers by node; those whose place is not known are left out."""
    sites: dict[Site, dict[int, Destination]] = {}
    for index, worker in workers.items():
        if worker.place is not None:
            sites.setdefault(Site.of(worker.place), {})[index] = worker
    return sites


def check_whole_nodes(chosen: Mapping[int, Destination], everybody: Mapping[int, Destination]) -> None:
    """Refuse to send to some of the workers that share an arena. Raises ValueError."""
    for site, members in sites_of(everybody).items():
        wanted = sorted(members.keys() & chosen.keys())
        if wanted and len(wanted) < len(members):
            raise ValueError(
                f"workers {sorted(members)} share one arena on node {site.node}, so a send cannot reach {wanted} "
                "alone; send to all of them, or use fan_out=None"
            )
