"""A worker's side of shared memory: its attachment to the arena of one model, and the receiver that binds the model."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from typing_extensions import override

from ..engine.bind.binding import bindable, fit_of
from ..engine.bind.guard import bind
from ..engine.bind.guarded_methods import calls_of
from ..engine.subscriber import Subscriber, reader_of
from ..errors import ProtocolError
from ..memory.segment import Handle
from .devices import lies_elsewhere
from .links import Inbox
from .messages import REGISTER, Message
from .receiver import PipeReceiver
from .strategy import WeightStrategy


class Attachment:
    """A worker's attachment to the arena of one model: a module is bound to it, anything else gets copies.

    Args:
        handle: of the arena.
        scheme: has `consistency`, `timeout` and `partial`.
        worker: the index by which the sender names this worker.

    Raises as Subscriber() does.
    """

    def __init__(self, handle: Handle, scheme: Any, worker: int | None) -> None:
        self.handle = handle
        self._strategy = WeightStrategy(partial=scheme.partial)
        self._bound: weakref.ref[nn.Module] | None = None  # its guard keeps the subscriber
        self.subscriber = Subscriber(handle, consistency=scheme.consistency, worker=worker, timeout=scheme.timeout)

    @property
    def version(self) -> int:
        """The version that the calling thread used last, else the applied one."""
        return self.subscriber.version

    def move_to(self, version: int) -> None:
        """Apply this version or a later one. Raises ProtocolError if the arena does not have it."""
        reader = reader_of(self.subscriber)
        self.subscriber.refresh()
        if reader.applied_version < version:
            where = "inside a read section of this thread" if reader.in_section else "in the arena that is known here"
            raise ProtocolError(
                f"version {version} was announced, but {where} it is {reader.applied_version}. Receive outside of "
                "sections; if the scheme was restarted, make a new receiver",
                version=version,
            )

    def check_fits(self, model: Any) -> None:
        """Raise ManifestMismatch, with nothing changed, unless the model has the arena's leaves."""
        if isinstance(model, nn.Module):
            reader = reader_of(self.subscriber)
            copies = lies_elsewhere(model, reader.arena.device)
            fit_of(bindable(model), reader.arena, reader.name, copies=copies)
        else:
            self._strategy.check_weights(model, self.subscriber.weights)

    def bind(self, model: Any) -> None:
        """Let the model use the arena: a module for good, anything else gets a copy of this version."""
        if not isinstance(model, nn.Module):
            with self.subscriber.read() as section:
                self._strategy.apply_weights(model, section.weights)
        elif self._bound is None or self._bound() is not model:
            reader = reader_of(self.subscriber)
            bind(reader, model, calls_of(model), copies=lies_elsewhere(model, reader.arena.device))
            self._bound = weakref.ref(model)

    def close(self) -> None:
        """Leave the arena; a bound module raises ClosedError from now on. Idempotent.

        Raises WriterBusy for an arena that another thread reads; call it again then.
        """
        self.subscriber.close()


def attached(inbox: Inbox, message: Message, scheme: Any) -> Attachment:
    """The attachment to the arena of a message's model, moved to the version that the message announces.

    It is the one that there is already, if that one is to the arena that the sender named last.

    Raises ValueError for weights that came by value, ProtocolError when the sender never named an arena, else as
    Subscriber() and Attachment.move_to() do.
    """
    kind, model_id, content, _ = message
    if kind == REGISTER:
        inbox.registered[model_id] = content.handle, content.worker
    elif type(content) is not int:
        raise ValueError(f"weights of {model_id!r} came through the pipe; use SharedMemWeightSyncScheme on both sides")
    if model_id not in inbox.registered:
        raise ProtocolError(
            f"{model_id!r} was never registered here; keep one receiver for each model, and let it see every message "
            "of the pipe"
        )
    handle, index = inbox.registered[model_id]
    made: Attachment | None = inbox.attachments.get(model_id)
    if made is None or made.handle != handle:
        earlier, made = made, Attachment(handle, scheme, index)
        if earlier is not None:
            earlier.close()  # a module is bound to one arena
        inbox.attachments[model_id] = made
    if kind != REGISTER:
        made.move_to(content)
    return made


class SharedMemReceiver(PipeReceiver):
    """Binds the model to the arena, and moves it to each version that is announced.

    The module is bound at the first receive(). From then on each forward uses the newest version.
    """

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._attachment: Attachment | None = None

    @property
    @override
    def version(self) -> int:
        """The version of the calling thread's last forward or receive(), whichever came last; else the applied one.

        Each forward uses the newest, so it may move on between two calls of receive().
        """
        return self._attachment.version if self._attachment else 0

    @override
    def _use(self, message: Message) -> None:
        self._attachment = attached(self._inbox, message, self._scheme)
        self._attachment.bind(self._resolve_model_ref())

    @override
    def close(self) -> None:
        """Leave the arena; a bound model raises ClosedError when it is called from now on."""
        if self._attachment is not None:
            self._attachment.close()
            if self._inbox.attachments.get(self._model_id) is self._attachment:
                del self._inbox.attachments[self._model_id]
            self._attachment = None
