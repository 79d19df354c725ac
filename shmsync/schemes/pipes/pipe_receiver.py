"""The receiver of a scheme whose sender is reached over a pipe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from ...engine.deadlines import deadline_after
from ..link import messages
from ..link.connection import Channel
from ..link.messages import Message, given_message
from ..link.worker_end import WorkerEnd
from ..receiver import WeightReceiver

_log = logging.getLogger("shmsync")


class PipeReceiver(WeightReceiver):
    """Applies messages at receive(), and answers them.

    Several receivers may share a pipe. Each receive() serves all of them, so that no sender waits while the worker
    receives another model; except those that another thread uses.
    """

    _end: WorkerEnd
    _thread: int | None = None  # that called receive() last
    _has_news = False  # another receiver's receive() has applied weights to this model

    @override
    def _register_worker_transport(self, pipe: Any) -> None:
        self._transport = self._make_transport(getattr(pipe, "pipe", pipe))
        self._end = WorkerEnd.of(Channel.of(self._transport.pipe))
        self._end.receivers[self._model_id] = self

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, within `timeout` seconds (None: the scheme's), and answer it. Was there news?

        Weights that cannot be applied raise in the sender. Here they are logged, and the model keeps what it had.

        Raises ValueError when no model is registered, WriterDied when the sender is gone, ProtocolError when what comes
        over the pipe is no message.
        """
        self._scheme.check_open("receive")
        deadline = deadline_after(timeout, self._scheme.timeout)
        if self._transport is None:
            return False
        end = self._end
        with end.lock:  # from here on no other thread applies weights to this model
            self._thread = threading.get_ident()
            if end.receivers.get(self._model_id) is not self:
                end.receivers[self._model_id] = self
        if not self._has_news and (message := end.quick(deadline)) is not None:
            if message.kind == messages.UPDATE and message.model_id == self._model_id and self._ready():
                self._apply(message)
                if not end.channel.readable:
                    news, self._has_news = self._has_news, False
                    return news
            else:
                end.put_back(message)
        while not self._has_news:
            message = end.next(self._concerns, deadline)
            if message is None:
                return False
            self._handle(message)
        while (message := end.next(self._concerns, 0.0)) is not None:
            self._handle(message)
        self._has_news = False
        self._use_news()
        return True

    @override
    def apply_weights(self, weights: Any) -> None:
        """Apply what the worker's own loop has read from the pipe, and answer it.

        Args:
            weights: a whole message, its (model_id, content), or the content alone: weights, a version, a handle. What
                is for another model goes to that one's receiver. An answer to less than the whole message may lack its
                name, and is then for the oldest message of its kind.

        Raises what applying raises, which the sender gets too; ValueError when no receiver has that model.
        """
        self._scheme.check_open("apply_weights")
        if self._transport is None:
            raise ValueError(f"the receiver of {self._model_id!r} has no pipe; call init_on_worker() first")
        message = given_message(weights, self._model_id, self._worker_idx)
        with self._end.lock:
            self._apply_given(message)

    def _apply_given(self, message: Message) -> None:
        end, word = self._end, messages.UPDATED
        try:
            receiver = self if message.model_id == self._model_id else end.receivers.get(message.model_id)
            if receiver is None:
                raise ValueError(
                    f"weights of {message.model_id!r} came to the receiver of {self._model_id!r}, and no receiver has "
                    f"that model; make one for {message.model_id!r}"
                )
            if message.kind == messages.UPDATE:
                receiver._use_given(message)
            else:
                receiver._attach(message)
                word = messages.REGISTERED
        except Exception as error:
            end.fail(message, error)
            raise
        if message.tag is not None:
            end.answer(message, word)
        else:
            end.ack(messages.UPDATED)

    def _use_given(self, message: Message) -> None:
        """Make the model use what the worker's own loop has read."""
        self._checked(message)()

    def _serves(self, model_id: str) -> PipeReceiver | None:
        """The receiver of this model, if this thread may apply to it at this moment."""
        receiver: PipeReceiver | None = self._end.receivers.get(model_id)
        if receiver is None or receiver._thread not in (None, self._thread) or not receiver._ready():
            return None
        return receiver

    def _concerns(self, message: Message) -> bool:
        return self._serves(message.model_id) is not None

    def _handle(self, message: Message) -> None:
        with self._end.lock:
            receiver = self._serves(message.model_id)
            if receiver is None:  # its own thread was quicker
                self._end.put_back(message)
            elif message.kind == messages.UPDATE:
                receiver._apply(message)
            else:
                try:
                    receiver._attach(message)
                except Exception as error:
                    receiver._refused(message, error)
                else:
                    self._end.answer(message, messages.REGISTERED)

    def _apply(self, message: Message) -> None:
        """Apply these weights, and answer.

        What they cannot be applied for raises in the sender. A receiver without a model raises here too, since that is
        the worker's mistake.
        """
        try:
            self._checked(message)()
        except Exception as error:
            self._refused(message, error)
            self.model()  # or raise
            return
        self._has_news = True
        self._end.answer(message, messages.UPDATED)

    def _refused(self, message: Message, error: Exception) -> None:
        reason = str(error)  # a kept log record keeps no weights alive
        _log.warning("%r of %r was refused: %s", message.kind, self._model_id, reason)
        self._end.answer_failure(message, error)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("_end", "_thread")}

    def model(self) -> Any:
        """The model that weights are applied to. Raises ValueError when there is none."""
        return self._resolve_model_ref()

    # What the schemes do differently.

    def _make_transport(self, pipe: Any) -> Any:
        """The transport over the worker's end."""
        return self._scheme.create_transport(pipe)

    def _ready(self) -> bool:
        """Can weights be applied at this moment?"""
        return True

    def _attach(self, message: Message) -> None:
        """Attach to the arena of the model."""
        raise ValueError(f"{self._model_id!r} is registered in shared memory; use one scheme on both sides")

    def _checked(self, message: Message) -> Callable[[], None]:
        """What makes the model use the version of the message. Raises if the model and the weights do not fit."""
        raise NotImplementedError

    def _use_news(self) -> None:
        """receive() returns True: `version` is what was applied, in whatever thread."""
