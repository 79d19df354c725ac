"""A pipe without a sender or receiver: the calls of one end in the trainer, those of the other in the worker."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

from ..engine.deadlines import deadline_after, timeout_or_default
from . import messages
from .links import Inbox, Link, gather, unexpected
from .messages import Message
from .pipe import Pipe
from .sender import PipeSender


class PipeTransport:
    """Weights over a pipe.

    In the trainer: send_weights(), send_weights_async(), wait_ack(), check_ack(). In the worker, with the other end:
    receive_weights(), send_ack(). On both sides: pending(), check_connection().
    """

    def __init__(self, scheme: Any, pipe: Any) -> None:
        self._scheme = scheme
        self.pipe = pipe
        self.timeout = timeout_or_default(scheme.timeout)
        self._senders: dict[str, PipeSender] = {}  # by model
        self._pending: deque[PipeSender] = deque()  # those that have sent, and were not waited for
        self._given: Message | None = None  # by receive_weights(); send_ack() answers it

    # ---- in the trainer

    def _links(self) -> dict[int, Link]:
        """The workers that a send goes to."""
        if self.pipe is None:
            raise ValueError("this transport has no pipe; make it with one end of multiprocessing.Pipe()")
        return {0: Link.of(self.pipe)}

    def _sender(self, model_id: str) -> PipeSender:
        if model_id not in self._senders:
            sender = self._senders[model_id] = self._scheme.create_sender()
            sender._set_context(None, model_id)
        self._senders[model_id]._use_links(self._links())
        return self._senders[model_id]

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send, and wait until the workers have applied them.

        Raises WorkerDied, AckTimeout, a worker's exception, or RuntimeError for an unexpected answer.
        """
        self._sender(model_id).send(weights)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send as far as the pipe takes it; wait_ack() sends the rest, and waits."""
        sender = self._sender(model_id)
        sender.send_async(weights)
        self._pending.append(sender)

    def wait_ack(self) -> None:
        """Wait for the answers to the oldest send_weights_async() that was not waited for. Raises as send_weights()."""
        self._oldest().wait_async()

    def _oldest(self) -> PipeSender:
        if not self._pending:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        return self._pending.popleft()

    def check_ack(self, message: str = "updated") -> None:
        """As wait_ack(), for a worker that answers with this word.

        Raises RuntimeError for another answer; pending() then has that one, unless it is "updated".
        """
        sender = self._oldest()
        if message == messages.UPDATED:
            sender.wait_async()
            return
        posted, sender._posted = sender._posted, None
        assert posted is not None
        outcome = gather(posted.workers, posted.tags, deadline_after(None, self.timeout))
        for index in [index for index, failure in outcome.failed.items() if failure == unexpected(message)]:
            posted.workers[index].pipe.pending.pop()
            del outcome.failed[index]
        what = f"version {posted.version} of {sender.model_id!r}"
        outcome.check(what, posted.version)
        if outcome.done:
            raise RuntimeError(f"expected the answer {message!r} to {what}, but got {messages.UPDATED!r}")

    # ---- in the worker

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """The next (model_id, weights) of any model; None if none came in `timeout` seconds. send_ack() answers."""
        if self.pipe is None:
            return None
        deadline = deadline_after(timeout, self.timeout)
        inbox = Inbox.of(self.pipe)
        while found := inbox.take(lambda _: True, deadline, 1):
            self._given = message = found[0]
            try:
                content = self._content(message)
            except Exception as error:
                Pipe.of(self.pipe).send(messages.failure(message, error))
                raise
            if message.kind == messages.UPDATE:
                return message.model_id, content
            self.send_ack(messages.REGISTERED)
        return None

    def send_ack(self, message: str = "updated") -> None:
        """Answer the weights that receive_weights() gave, or that the worker's own loop has read."""
        if self.pipe is not None:
            given, self._given = self._given, None
            answered = given or Message(messages.UPDATE, "", None, None)
            if given is None or message not in (messages.UPDATED, messages.REGISTERED):
                answered = answered._replace(content=None)  # a word of the user's own has its tag beside it
            Pipe.of(self.pipe).send(messages.answer(answered, message))

    @abstractmethod
    def _content(self, message: Message) -> Any:
        """What receive_weights() gives for a message."""

    # ---- on both sides

    def check_connection(self) -> bool:
        """Are both ends open, as far as is known?"""
        if self.pipe is None:
            return True
        pipe = Pipe.of(self.pipe)
        return not (pipe.end.dead if isinstance(pipe.end, Link) else pipe.over)

    def pending(self) -> list[Any]:
        """Messages that came over the pipe and are not about weights, oldest first; each is given once."""
        if self.pipe is None:
            return []
        pipe = Pipe.of(self.pipe)
        if isinstance(pipe.end, Link):
            pipe.end.pump()
        return pipe.take_pending()
