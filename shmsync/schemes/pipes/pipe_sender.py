"""The sender of a scheme whose workers are reached over pipes: all at once, with one wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ..context_args import chosen_workers
from ..link.send_lock import SendLock, hold_all
from ..sender import WeightSender
from .pipe_carrier import PipeCarrier, Posted
from .pipe_transport import WorkerTransport


class PipeSender(WeightSender):
    """Sends one model to workers at the other ends of pipes."""

    takes_process = True
    _scheme: Any  # has .timeout and .create_carrier()

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme)
        self.default_timeout = scheme.timeout

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self.carrier: PipeCarrier = self._scheme.create_carrier()

    @property
    @override
    def version(self) -> int:
        return self.carrier.version(self.model_id)

    @property
    @override
    def worker_ids(self) -> list[int]:
        return sorted(self.carrier.links)

    @override
    def _register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        pipe = getattr(pipe_or_context, "pipe", pipe_or_context)
        self.carrier.add(worker_idx, pipe, self._processes.get(worker_idx))

    @override
    def _transport_of(self, index: int) -> WorkerTransport:
        link = self.carrier.links[index]
        known = self._transports.get(index)
        if known is None or known.link is not link:
            known = self._transports[index] = WorkerTransport(self.carrier, index, link, self.default_timeout)
        return known

    @override
    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        return self._reached(super()._chosen(worker_ids))

    @override
    def _is_dead(self, index: int) -> bool:
        return self.carrier.links[index].reported

    def pending(self, worker_idx: int) -> list[Any]:
        """Messages from a worker that are no answers, oldest first; each is given once.

        A wait for answers reads the whole pipe, so a recv() of your own may miss what arrives meanwhile. Raises
        ValueError for a worker that is not registered.
        """
        (index,) = chosen_workers([worker_idx], self.worker_ids)
        return self.carrier.links[index].take_pending()

    def resend(self, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None) -> int:
        """Bring workers that joined late to the newest version, with every leaf; nothing new is published.

        Weights that went through the pipe and were refused by every worker that answered are brought to no other one:
        those before them are. What lies in an arena is brought again, and refused again.

        Returns that version, 0 if nothing was sent yet. Raises as send() does, and ProtocolError when the workers
        refused all that was sent.
        """
        deadline = self._deadline(timeout)
        with hold_all(self.send_locks(), deadline, "resend"):
            if not self.version:
                return 0
            self.check_ready("resend")
            links = self.carrier.reach(self.model_id, self._chosen(worker_ids))
            if not links:
                return 0
            posted = self.carrier.resend(self.model_id, links)
            self.carrier.collect(posted, deadline)
            return posted.version

    @override
    def send_locks(self) -> list[SendLock]:
        # Two senders of one model over one pipe would give their weights the same number, or replace each other's.
        shared = [link.end.send_locks(self.model_id) for link in list(self.carrier.links.values())]
        return [*super().send_locks(), *shared]

    @override
    def _post(self, weights: Any, workers: list[int], deadline: float) -> Posted:
        links = self.carrier.reach(self.model_id, workers)
        return self.carrier.post(self.model_id, self.sent_weights(weights), links, deadline)

    @override
    def _collect(self, posted: Posted, deadline: float) -> None:
        self.carrier.collect(posted, deadline)
