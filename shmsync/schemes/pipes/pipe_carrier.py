"""The one way of sending over pipes. A kind of scheme says what travels: it derives a PipeCarrier of three methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ...engine.outcome import Outcome
from ...errors import WorkerDied
from ..arenas.publishers import Plan, write
from ..link.gather import gather
from ..link.messages import Tag
from ..link.sender_end import Link


class Posted(NamedTuple):
    """A version of one model on its way."""

    model_id: str
    version: int
    links: dict[int, Link]
    tags: dict[int, list[Tag]]  # the answers that each of them is to send


class PipeCarrier(ABC):
    """Brings weights to workers at the other ends of pipes."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}  # the workers by index
        self.sign = object()  # marks what this carrier has announced; see SenderEnd.announcers

    # What the kinds do differently.

    @abstractmethod
    def version(self, model_id: str) -> int:
        """The newest version of a model; 0: none yet."""

    @abstractmethod
    def plan(self, model_id: str, weights: Any, links: Mapping[int, Link], version: int) -> Plan:
        """Check weights that are to be this version for these workers. Changes nothing; raises what speaks against."""

    @abstractmethod
    def announce(self, model_id: str, links: Mapping[int, Link], *, again: bool = False) -> dict[int, list[Tag]]:
        """Send the newest version to these workers; the answers that each of them is to send.

        `again`: all of it, where the last send had a part.
        """

    def add(self, index: int, pipe: Any, process: Any = None) -> None:
        """Reach this worker over this pipe from now on."""
        self.links[index] = Link(pipe, process)

    def done_before_leaving(self, model_id: str, index: int) -> bool:
        """Did a worker that exited use the newest version before, without an answer?"""
        return False

    # What they have in common.

    def living(self) -> dict[int, Link]:
        """The workers whose death no error has named."""
        return {index: link for index, link in self.links.items() if not link.reported}

    def reach(self, model_id: str, workers: Collection[int]) -> dict[int, Link]:
        """Those of these workers whose death no error has named; a newly dead one is found while its answer is awaited.

        Raises WorkerDied when none is left.
        """
        links = {index: self.links[index] for index in workers if not self.links[index].reported}
        if workers and not links:
            raise WorkerDied(
                f"all workers that {model_id!r} should go to are dead ({', '.join(map(str, workers))}); nothing "
                "was sent. Restart them, and register them again",
                missing=list(workers),
            )
        return links

    def post(self, model_id: str, weights: Any, links: dict[int, Link], deadline: float) -> Posted:
        """Make weights the next version, and send it to these workers."""
        # No sender used this number for the model on these pipes: a late answer never counts for a newer message.
        used = max((link.end.highest.get(model_id, 0) for link in links.values()), default=0)
        version = max(self.version(model_id), used) + 1
        write(self.plan(model_id, weights, links, version), version, deadline)
        return self._announced(model_id, version, links, self.announce(model_id, links))

    def resend(self, model_id: str, links: dict[int, Link]) -> Posted:
        """Send the newest version to these workers once more, all of it."""
        return self._announced(model_id, self.version(model_id), links, self.announce(model_id, links, again=True))

    def _announced(self, model_id: str, version: int, links: dict[int, Link], tags: dict[int, list[Tag]]) -> Posted:
        newest = max((tag.version for each in tags.values() for tag in each), default=version)
        return Posted(model_id, newest, links, tags)

    def collect(self, posted: Posted, deadline: float) -> None:
        """Wait for all answers. Raises WorkerDied, AckTimeout, or a worker's own exception."""
        outcome = gather(posted.links, posted.tags, deadline)
        self.mark(posted, outcome)
        outcome.check(f"version {posted.version} of {posted.model_id!r}", posted.version)

    def mark(self, posted: Posted, outcome: Outcome) -> None:
        """Take in what a wait for this version found: the dead are left out from now on, their successors are not."""
        for index in list(outcome.dead):
            link = posted.links[index]
            if self.done_before_leaving(posted.model_id, index) and link.finished:
                del outcome.dead[index]
                outcome.done.append(index)
            else:
                link.reported = True
