"""A pipe without a sender or receiver: the calls of one end in the trainer, those of the other in the worker."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

from ..engine.deadlines import deadline_after, timeout_or_default
from . import messages
from .links import Inbox, Link
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
        self._senders[model_id]._links = self._links()
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
        self.check_ack()

    def check_ack(self, message: str = "updated") -> None:
        """As wait_ack(), for a worker that answers with this word.

        Raises RuntimeError for another answer; pending() then has that one, unless it is "updated".
        """
        if not self._pending:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        sender = self._pending.popleft()
        if sender._posted is not None:
            sender._posted.word = message
        sender.wait_async()

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
                inbox.send(message.failure(error))
                raise
            if message.kind == messages.UPDATE:
                return message.model_id, content
            self.send_ack(messages.REGISTERED)
        return None

    def send_ack(self, message: str = "updated") -> None:
        """Answer the weights that receive_weights() gave, or that the worker's own loop has read."""
        if self.pipe is not None:
            given, self._given = self._given, None
            Inbox.of(self.pipe).send((given or Message(messages.UPDATE, "", None, None)).answer(message))

    @abstractmethod
    def _content(self, message: Message) -> Any:
        """What receive_weights() gives for a message."""

    # ---- on both sides

    def check_connection(self) -> bool:
        """Are both ends open, as far as is known?"""
        end = None if self.pipe is None else Pipe.known(self.pipe)
        return self.pipe is None or not (self.pipe.closed or (end is not None and end.ended))

    def pending(self) -> list[Any]:
        """Messages that came over the pipe and are not about weights, oldest first; each is given once."""
        end = None if self.pipe is None else Pipe.known(self.pipe)
        return [] if end is None else end.take_pending()
