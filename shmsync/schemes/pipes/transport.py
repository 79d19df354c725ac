"""What the transports over a pipe have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...engine.timing import check_timeout, deadline_after
from ...errors import AckTimeout, WorkerDied
from . import messages
from .connection import Channel
from .exchange import Link, gather
from .sender_end import unexpected
from .worker_end import Inbox, Message


class PipeTransport:
    """One end of a pipe: the sender's, or the worker's, whichever it is used as first."""

    def __init__(self, pipe_connection: Any, timeout: float) -> None:
        self.pipe = pipe_connection
        self.timeout = check_timeout(timeout)
        self._link: Link | None = None

    @property
    def channel(self) -> Channel:
        """The pipe, without blocking."""
        if self.pipe is None:
            raise ValueError("this transport has no pipe; make it with one end of multiprocessing.Pipe()")
        return Channel.of(self.pipe)

    @property
    def link(self) -> Link:
        """The worker at the other end."""
        if self._link is None:
            self._link = Link(self.pipe)
        return self._link

    @property
    def inbox(self) -> Inbox:
        """What the sender at the other end has sent."""
        return Inbox.of(self.channel)

    def check_connection(self) -> bool:
        """Is this end open, and the other one, as far as is known?"""
        return self.pipe is None or not (self.channel.closed or self.channel.ended)

    def pending(self) -> list[Any]:
        """Messages that came over the pipe and are not about weights, oldest first; each is given once."""
        return self.channel.take_pending()

    def wait_ack(self) -> None:
        """Wait for the answer to the last send_weights_async(). Raises as send_weights()."""
        self.check_ack(messages.UPDATED)

    def check_ack(self, message: str = "updated") -> None:
        """Wait for the next answer, which should be `message`. Raises WorkerDied, AckTimeout, the worker's exception,
        or RuntimeError for another answer, which stays in pending()."""
        deadline = deadline_after(None, self.timeout)
        tag = self.link.answers.oldest()
        if tag is not None:
            outcome = gather({0: self.link}, {0: [tag]}, deadline)
            if message != messages.UPDATED and outcome.failed.get(0) == unexpected(message):
                self.channel.pending.pop()
                return
            outcome.check(f"version {tag.version} of {tag.model_id!r}", tag.version)
            if message != messages.UPDATED:
                raise RuntimeError(f"expected the answer {message!r} but got {messages.UPDATED!r}")
            return
        answers = self.link.answers
        while (stray := answers.stray()) is None:
            answers.pump()
            if answers.channel.pending:
                raise RuntimeError(f"expected the answer {message!r} but got {answers.channel.pending[-1]!r}")
            if self.link.dead:
                raise WorkerDied(f"the worker died before it answered {message!r} ({self.link})", missing=[0])
            if time.monotonic() >= deadline:
                raise AckTimeout(
                    f"the worker has not answered {message!r} in time; give more with timeout=", missing=[0]
                )
            answers.channel.wait(min(deadline, time.monotonic() + 0.05))
        if stray[1] != message:
            raise RuntimeError(f"expected the answer {message!r} but got {stray[1]!r}")

    def send_ack(self, message: str = "updated") -> None:
        """In the worker: answer the weights that receive_weights() gave, or that the worker's own loop has read."""
        inbox = self.inbox
        answered, inbox.unanswered = inbox.unanswered, None
        inbox.answer(answered or Message(messages.UPDATE, "", None, None), message)

    def next_message(self, wanted: Callable[[Message], bool], timeout: float) -> Message | None:
        """The next one for receive_weights()."""
        message = self.inbox.next(wanted, time.monotonic() + check_timeout(timeout))
        if message is not None:
            self.inbox.unanswered = message
        return message
