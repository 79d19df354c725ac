"""Weights through the pipe: a private copy for every worker. The simplest scheme, and the slowest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.pickling import dumps
from ...engine.strategy import Form
from ...engine.timing import check_timeout
from ..api import WeightSyncScheme
from ..publishers import Plan
from . import messages
from .exchange import Link
from .messages import Tag, Tagged
from .receiver import PipeReceiver
from .sender import PipeSender
from .transport import PipeTransport
from .worker_end import Message


class MPTransport(PipeTransport):
    """Weights through one pipe, in either direction.

    Args:
        pipe_connection: one end of a duplex multiprocessing.Pipe; None makes a transport without a worker.
        timeout: seconds to wait for an answer; math.inf waits for ever.
    """

    def __init__(self, pipe_connection: Any, timeout: float = 10.0) -> None:
        super().__init__(pipe_connection, timeout)

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send, and wait until the worker has applied them. Raises WorkerDied, AckTimeout, the worker's exception, or
        RuntimeError for an unexpected answer."""
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send as far as the pipe takes it; wait_ack() sends the rest, and waits."""
        tag = Tag(model_id, self.link.answers.highest(model_id) + 1)
        message = dumps(Tagged(((model_id, weights), messages.UPDATE), tag))
        self.link.answers.send(message, tag, replaceable=True)

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """In the worker: the next weights of any model, as (model_id, weights); None if none came. send_ack()
        answers."""
        message = self.next_message(lambda message: message.kind == messages.UPDATE, timeout)
        return None if message is None else (message.model_id, message.content)


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights are copied through a pipe to each worker, which applies them at its receive().

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        timeout: default of a send, in seconds; math.inf waits for ever.
    """

    def __init__(self, strategy: Form = "state_dict", *, timeout: float = 10.0) -> None:
        super().__init__(strategy)
        self.timeout = check_timeout(timeout)

    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """As in WeightSyncScheme; `pipes` must be given."""
        if kwargs.get("pipes") is None and getattr(context, "pipes", None) is None:
            raise ValueError("pipes must be given, as pipes= or by a context that has .pipes")
        super().init_on_sender(model_id, context, **kwargs)

    def create_transport(self, pipe_or_context: Any) -> MPTransport:
        """The transport over this pipe."""
        return MPTransport(getattr(pipe_or_context, "pipe", pipe_or_context), self.timeout)

    def create_sender(self) -> PipeSender:
        """As in WeightSyncScheme."""
        return _Sender(self)

    def create_receiver(self) -> PipeReceiver:
        """As in WeightSyncScheme."""
        return _Receiver(self)


class _Sender(PipeSender):
    def __init__(self, scheme: MultiProcessWeightSyncScheme) -> None:
        super().__init__(scheme)
        self._payload = b""  # the newest weights, pickled once for all workers

    def _plan(self, weights: Any, links: Mapping[int, Link], version: int) -> Plan:
        message = Tagged(((self._model_id, self._prepared(weights)), messages.UPDATE), Tag(self._model_id, version))
        payload = dumps(message)

        def accept() -> None:
            self._payload = payload

        return Plan([], accept, lambda: None)

    def _send_version(self, links: Mapping[int, Link]) -> dict[int, list[Tag]]:
        tag = Tag(self._model_id, self._version)
        for link in links.values():
            link.answers.send(self._payload, tag, replaceable=True)
        return {index: [tag] for index in links}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_payload": b"", "_version": 0}


class _Receiver(PipeReceiver):
    def _check(self, message: Message) -> None:
        self._strategy.check_weights(self._resolve_model(), message.content)

    def _use(self, message: Message) -> None:
        self._strategy.apply_weights(self._resolve_model(), message.content)
        if message.tag is not None:
            self._version = message.tag.version
