"""The receiver: what applies the weights of one model in a worker. Schemes derive theirs from it."""

from __future__ import annotations

import logging
import threading
import weakref
from abc import abstractmethod
from typing import Any

from typing_extensions import override

from ..engine.deadlines import check_worker, deadline_after, timeout_or_none
from .context import Arguments, model_in
from .links import Inbox
from .messages import UPDATE, Message, given_message

_log = logging.getLogger("shmsync")


class WeightReceiver:
    """Receives the weights of one model, over any transport. Made by a scheme.

    Args:
        scheme: the WeightSyncScheme that makes it.
    """

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self._strategy = scheme.make_strategy()
        self._model_id = "policy"
        self._worker_idx: int | None = None
        self._context_ref: weakref.ref[Any] | None = None
        self._model_ref: Any = None
        self._transport: Any = None
        self._version = 0

    @property
    def model_id(self) -> str:
        """Which model it receives."""
        return self._model_id

    @property
    def worker_idx(self) -> int | None:
        """The index that init_on_worker() was given for this worker."""
        return self._worker_idx

    @property
    def transport(self) -> Any:
        """How the weights come; None before init_on_worker()."""
        return self._transport

    @property
    def version(self) -> int:
        """The version of the weights that the model uses now; 0: those it came with.

        To wait for a version, loop until receive() is True: with shared memory the model may use it before that.
        """
        return self._version

    def pending(self) -> list[Any]:
        """Messages that came over the pipe and are not about weights, oldest first; each is given once."""
        return list(self._transport.pending()) if hasattr(self._transport, "pending") else []

    def _set_context(self, context: Any) -> None:
        """Look for the model here. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)

    def _register_model(self, model_ref: Any) -> None:
        """The model itself, or its id in the context."""
        self._model_ref = model_ref

    def _register_worker_transport(self, pipe: Any) -> None:
        """Receive from the sender over this pipe."""
        self._transport = self._scheme.create_transport(pipe)

    def _resolve_model_ref(self) -> Any:
        """The model that weights are applied to. Raises ValueError when there is none."""
        reference = self._model_ref
        if reference is not None and not isinstance(reference, str):
            return reference
        if reference is None or self._context_ref is None:
            which = "" if reference is None else f" for {reference!r}"
            raise ValueError(f"no model is registered{which}; give init_on_worker() model= or a context that has it")
        if (context := self._context_ref()) is None:
            raise ValueError(f"the context that had {reference!r} is gone; keep it as long as its receiver")
        return model_in(context, reference)

    def set_up(self, arguments: Arguments) -> None:
        """Take in the model, and the way to the sender. Called by init_on_worker()."""
        self._set_context(arguments.context)
        self._model_id = arguments.model_id
        worker = arguments.get("worker_idx")
        self._worker_idx = None if worker is None else check_worker(worker)
        model = arguments.model()
        self._connect(arguments)
        self._register_model(arguments.model_id if model is None else model)
        if (wait := timeout_or_none(arguments.given("wait"))) is not None:
            self._wait_for_first(wait)

    def _wait_for_first(self, seconds: float) -> None:
        if not self.receive(seconds):
            raise TimeoutError(f"no weights of {self._model_id!r} came within {seconds} s; is the sender sending?")

    def _connect(self, arguments: Arguments) -> None:
        """Take in the way to the sender from these arguments."""
        self._register_worker_transport(arguments.needed("pipe"))

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, and answer the sender.

        Args:
            timeout: seconds to wait for the first message; 0 only looks, None is the scheme's or the transport's own.

        Returns:
            Were there new weights? None ever come to a receiver before init_on_worker().

        Raises:
            ValueError: no model is registered, or the context that had it is gone.
            WriterDied: the sender is gone.
            Exception: that of applying them, here and, with its traceback, in the sender.
        """
        timeout = timeout_or_none(timeout)
        self._scheme.check_open("receive")
        received = None if self._transport is None else self._transport.receive_weights(timeout=timeout)
        if received is None:
            return False
        self.apply_weights(received)
        return True

    def apply_weights(self, weights: Any) -> None:
        """Apply weights that the worker's own loop has read, alone or as (model_id, weights), and answer the sender.

        Raises ValueError for weights of another model, and what applying raises.
        """
        self._strategy.apply_weights(self._resolve_model_ref(), self._own(weights))
        if hasattr(self._transport, "send_ack"):
            self._transport.send_ack("updated")

    def _own(self, weights: Any) -> Any:
        """Weights, without the id of their model. Raises ValueError when that is another model."""
        if type(weights) is not tuple or len(weights) != 2 or not isinstance(weights[0], str):
            return weights
        if weights[0] != self._model_id:
            raise ValueError(
                f"weights of {weights[0]!r} came to the receiver of {self._model_id!r}; make a receiver for "
                f"{weights[0]!r} too"
            )
        return weights[1]

    def close(self) -> None:
        """Give back what the receiver holds. Idempotent; it also happens when the process ends."""


class PipeReceiver(WeightReceiver):
    """Applies messages at receive(), and answers them.

    Several receivers may share a pipe. Each receive() also serves the others that this thread uses, so that no sender
    waits while the worker receives another model.
    """

    _inbox: Inbox
    _thread: int | None = None  # that called receive() last
    _has_news = False  # another receiver's receive() has applied weights to this model

    @override
    def _register_worker_transport(self, pipe: Any) -> None:
        self._transport = self._scheme.create_transport(pipe)
        self._inbox = Inbox.of(self._transport.pipe)
        self._inbox.receivers[self._model_id] = self

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, within `timeout` seconds (None: the scheme's), and answer it. Was there news?

        Weights that cannot be applied raise in the sender. Here they are logged, and the model keeps what it had.

        Raises ValueError when no model is registered, WriterDied when the sender is gone.
        """
        self._scheme.check_open("receive")
        deadline = deadline_after(timeout, self._scheme.timeout)
        if self._transport is None:
            return False
        self._thread = threading.get_ident()
        # All that is there, before the answers: a sender that is fast enough would keep this call for ever.
        while not self._has_news and (batch := self._inbox.take(self._serves, deadline)):
            refused = False
            for message in batch:
                if (receiver := self._receiver_of(message)) is None:
                    continue  # it went while others were served
                try:
                    receiver._apply(message)
                except Exception as error:
                    _log.warning("%r of %r was refused: %s", message.kind, message.model_id, error)
                    refused = refused or message.kind == UPDATE  # a registration fails again with its weights
                else:
                    receiver._has_news = receiver._has_news or message.kind == UPDATE
            if refused:
                self._resolve_model_ref()  # a receiver without a model raises here too
        news, self._has_news = self._has_news, False
        return news

    def _serves(self, message: Message) -> bool:
        """Is it for this model, or for another one that this thread uses?"""
        receiver = self._receiver_of(message)
        return receiver is not None and (receiver is self or receiver._thread in (None, self._thread))

    def _receiver_of(self, message: Message) -> PipeReceiver | None:
        return self if message.model_id == self._model_id else self._inbox.receivers.get(message.model_id)

    def _apply(self, message: Message) -> None:
        """Do what a message says, and answer it. Raises what that failed with, which the sender gets too."""
        try:
            if message.model_id != self._model_id:
                raise ValueError(
                    f"weights of {message.model_id!r} came to the receiver of {self._model_id!r}, and no receiver has "
                    f"that model; make one for {message.model_id!r}"
                )
            self._use(message)
        except Exception as error:
            self._inbox.send(message.failure(error))
            raise
        self._inbox.send(message.answer())

    @override
    def apply_weights(self, weights: Any) -> None:
        """Apply what the worker's own loop has read from the pipe, and answer it.

        Args:
            weights: a whole message, its (model_id, content), or the content alone: weights, a version, the arena. What
                is for another model goes to that one's receiver. The answer to less than the whole message may lack its
                name, and is then for the oldest message of its kind.

        Raises what applying raises, which the sender gets too; ValueError when no receiver has that model.
        """
        self._scheme.check_open("apply_weights")
        if self._transport is None:
            raise ValueError(f"the receiver of {self._model_id!r} has no pipe; call init_on_worker() first")
        message = given_message(weights, self._model_id)
        (self._receiver_of(message) or self)._apply(message)

    @abstractmethod
    def _use(self, message: Message) -> None:
        """Do what the message says: make the model use its weights, or attach to its arena."""
