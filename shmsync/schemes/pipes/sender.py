"""The sender of a scheme whose workers are reached over pipes: all at once, with one wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...engine.outcome import Outcome
from ...engine.timing import deadline_after
from ...errors import WorkerDied
from ..api import WeightSender
from ..publishers import Plan, write
from .exchange import Link, gather
from .messages import Tag


class Posted(NamedTuple):
    """A version on its way."""

    version: int
    links: dict[int, Link]
    tags: dict[int, list[Tag]]  # which answers each of them owes


class PipeSender(WeightSender):
    """Sends a small message, or the weights, down every pipe; then waits for all answers at once."""

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme)
        self._links: dict[int, Link] = {}
        self._default_timeout: float = scheme.timeout

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """As in WeightSender."""
        link = Link(getattr(pipe_or_context, "pipe", pipe_or_context), process)
        super().register_worker(worker_idx, pipe_or_context, process)
        self._links[worker_idx] = link

    def is_dead(self, worker_idx: int) -> bool:
        """As in WeightSender."""
        return self._links[worker_idx].reported

    def pending(self, worker_idx: int) -> list[Any]:
        """Messages from a worker that are no answers, oldest first; each is given once. A wait for answers reads the
        whole pipe, so a recv() of your own may miss what arrives meanwhile."""
        return self._links[worker_idx].take_pending()

    def resend(self, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None) -> int:
        """Bring workers that joined late to the newest version; nothing new is published. Returns it, 0 if nothing was
        sent yet. Raises as send() does."""
        self._refuse_pending("resend")
        workers = self._chosen(worker_ids)
        if not self.version:
            return 0
        posted = self._posted(self.version, self._alive(workers))
        self._collect(workers, posted, self._deadline(timeout))
        return max((tag.version for tags in posted.tags.values() for tag in tags), default=self.version)

    def _post(self, weights: Any, workers: list[int], deadline: float) -> Posted:
        links = self._alive(workers)
        version = self._next_version(links)
        write([self._plan(weights, links, version)], version, deadline)
        return self._posted(version, links)

    def _next_version(self, links: Mapping[int, Link]) -> int:
        """One that neither this sender nor an earlier one has used on these pipes."""
        used = max((link.answers.highest(self._model_id) for link in links.values()), default=0)
        return max(self.version, used) + 1

    def _posted(self, version: int, links: dict[int, Link]) -> Posted:
        self._version = version
        return Posted(version, links, self._send_version(links))

    def _collect(self, workers: list[int], posted: Posted, deadline: float) -> None:
        outcome = gather(posted.links, posted.tags, deadline)
        self._mark(outcome)
        outcome.check(f"version {posted.version} of {self._model_id!r}", posted.version)

    def _mark(self, outcome: Outcome) -> None:
        for index in outcome.dead:
            self._links[index].reported = True

    def _alive(self, workers: list[int]) -> dict[int, Link]:
        """Those whose death no error has named; a newly dead one is found while its answer is awaited."""
        links = {index: self._links[index] for index in workers if not self._links[index].reported}
        if workers and not links:
            raise WorkerDied(
                f"all workers that {self._model_id!r} should go to are dead ({', '.join(map(str, workers))}); nothing "
                "was sent. Start them again and register them anew",
                missing=workers,
            )
        return links

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(timeout, self._default_timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_links": {}}

    # What the schemes do differently.

    def _plan(self, weights: Any, links: Mapping[int, Link], version: int) -> Plan:
        """Check new weights for these workers."""
        raise NotImplementedError

    def _send_version(self, links: Mapping[int, Link]) -> dict[int, list[Tag]]:
        """Tell these workers of the newest version; which answers each of them owes."""
        raise NotImplementedError
