"""A pipe without a sender or receiver: the calls of one end in the trainer, those of the other in the worker."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...engine.deadlines import deadline_after, timeout_or_default
from ..link import messages
from ..link.connection import Channel
from ..link.gather import gather
from ..link.send_lock import SendLock, hold_all
from ..link.sender_end import Link, unexpected
from ..link.worker_end import WorkerEnd
from .pipe_carrier import PipeCarrier, Posted


class PipeTransport:
    """Weights over a pipe.

    In the trainer: send_weights(), send_weights_async(), wait_ack(), check_ack(). In the worker, with the other end:
    receive_weights(), send_ack(). On both sides: pending(), check_connection().
    """

    def __init__(self, pipe: Any, timeout: float | None, carrier: PipeCarrier) -> None:
        self.pipe = pipe
        self.timeout = timeout_or_default(timeout)
        self.carrier = carrier
        self._own_links = carrier.links  # the workers that it may reach
        self._posted: deque[Posted] = deque()  # by send_weights_async(), and not waited for

    def _channel(self) -> Channel:
        if self.pipe is None:
            raise ValueError("this transport has no pipe; make it with one end of multiprocessing.Pipe()")
        return Channel.of(self.pipe)

    # In the trainer.

    def _links(self) -> dict[int, Link]:
        """The workers that a send goes to."""
        if not self._own_links:
            self._channel()  # or raise
            self.carrier.add(0, self.pipe)
        return self._own_links

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send, and wait until the workers have applied them.

        Raises WorkerDied, AckTimeout, a worker's exception, or RuntimeError for an unexpected answer.
        """
        deadline = deadline_after(None, self.timeout)
        with hold_all(self._send_locks(model_id), deadline, "send_weights"):
            posted = self.carrier.post(model_id, weights, dict(self._links()), deadline)
            self.carrier.collect(posted, deadline)

    def _send_locks(self, model_id: str) -> list[SendLock]:
        return [link.end.send_locks(model_id) for link in list(self._links().values())]

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send as far as the pipe takes it; wait_ack() sends the rest, and waits."""
        deadline = deadline_after(None, self.timeout)
        with hold_all(self._send_locks(model_id), deadline, "send_weights_async"):
            self._posted.append(self.carrier.post(model_id, weights, dict(self._links()), deadline))

    def wait_ack(self) -> None:
        """Wait for the answers to the oldest send_weights_async() that was not waited for. Raises as send_weights()."""
        if self._posted:
            self.carrier.collect(self._posted.popleft(), deadline_after(None, self.timeout))
        else:
            self.check_ack(messages.UPDATED)

    def check_ack(self, message: str = "updated") -> None:
        """Wait for the answer to the oldest weights that were sent, which should be `message`.

        Raises WorkerDied, AckTimeout or the worker's exception. Raises RuntimeError when no answer is awaited, or for
        another answer; pending() then has that one, unless it is "updated".
        """
        links = self._links()
        if len(links) != 1:
            raise ValueError(f"check_ack() listens to one worker, and this transport has {len(links)}; use wait_ack()")
        ((index, link),) = links.items()
        deadline = deadline_after(None, self.timeout)
        tag = link.end.oldest()
        if tag is None:
            raise RuntimeError(
                "no send is pending; call send_weights_async() first. A wait that raised has given its answer up"
            )
        self._posted.clear()
        outcome = gather({index: link}, {index: [tag]}, deadline)
        if message != messages.UPDATED and outcome.failed.get(index) == unexpected(message):
            link.channel.pending.pop()
            return
        outcome.check(f"version {tag.version} of {tag.model_id!r}", tag.version)
        if message != messages.UPDATED:
            raise RuntimeError(
                f"expected the answer {message!r} but got {messages.UPDATED!r}: the worker has applied version "
                f"{tag.version} of {tag.model_id!r}; let it answer with send_ack({message!r}), or expect 'updated'"
            )

    # In the worker.

    @property
    def end(self) -> WorkerEnd:
        """What the sender at the other end has sent."""
        return WorkerEnd.of(self._channel())

    def send_ack(self, message: str = "updated") -> None:
        """Answer the weights that receive_weights() gave, or that the worker's own loop has read."""
        self.end.ack(message)

    # On both sides.

    def check_connection(self) -> bool:
        """Are both ends open, as far as is known?"""
        here = self.pipe is None or not (self._channel().closed or self._channel().ended)
        return here and not any(link.dead for link in self._own_links.values())

    def pending(self) -> list[Any]:
        """Messages that came over the pipe and are not about weights, oldest first; each is given once."""
        found = [] if self.pipe is None else self._channel().take_pending()
        for link in self._own_links.values():
            found += link.take_pending()
        return found


class WorkerTransport(PipeTransport):
    """Sends to one of the workers that a sender has, with what that sender sends with."""

    def __init__(self, carrier: PipeCarrier, index: int, link: Link, timeout: float) -> None:
        super().__init__(link.pipe, timeout, carrier)
        self.link, self.worker_idx = link, index
        self._own_links = {index: link}

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None: this end of the pipe is the sender's."""
        return None
