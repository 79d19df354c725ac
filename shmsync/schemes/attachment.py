"""A worker's attachment to the arena of one model."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..engine.bind.binding import ModuleCheck, bindable
from ..engine.bind.guard import bind
from ..engine.bind.guarded_methods import can_be_called
from ..engine.subscriber import Subscriber, reader_of
from ..errors import ProtocolError
from ..memory.segment import Handle
from .devices import lies_elsewhere
from .links import Inbox
from .messages import REGISTER, Message
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
        self.made_of = handle, scheme.consistency, scheme.timeout, scheme.partial
        self._strategy = WeightStrategy(partial=scheme.partial)
        self._bound: list[weakref.ref[nn.Module]] = []  # at most one
        self.subscriber = Subscriber(handle, consistency=scheme.consistency, worker=worker, timeout=scheme.timeout)
        # Without a warning: a scheme of this shape has no close(), so collecting it is the normal end.
        self._closing = weakref.finalize(self, _close_unused, self.subscriber, self._bound)
        self._closing.atexit = False  # the subscriber ends by itself then

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

    def check_whole(self, model: Any) -> None:
        """Raise ManifestMismatch, with nothing changed, unless the model has exactly the arena's leaves."""
        if isinstance(model, nn.Module):
            self._check_of(model, whole=True).fit(bindable(model))
        else:
            WeightStrategy().check_weights(model, self.subscriber.weights)

    def _check_of(self, model: nn.Module, *, whole: bool = False) -> ModuleCheck:
        reader = reader_of(self.subscriber)
        elsewhere = lies_elsewhere(model, reader.arena.device)
        return ModuleCheck(reader.arena, reader.name, copies=elsewhere, whole=whole)

    def bind(self, model: Any) -> None:
        """Let the model use the arena: a module for good, anything else gets a copy of this version."""
        if not isinstance(model, nn.Module):
            with self.subscriber.read() as section:
                self._strategy.apply_weights(model, section.weights)
        elif not (self._bound and self._bound[0]() is model):
            check = self._check_of(model)
            bind(reader_of(self.subscriber), model, can_be_called(model), check, clones=True)
            self._bound[:] = [weakref.ref(model)]

    def close(self) -> None:
        """Leave the arena; a bound module raises ClosedError from now on. Idempotent.

        Raises WriterBusy for an arena that another thread reads; call it again then.
        """
        self.subscriber.close()


def attached(inbox: Inbox, message: Message, scheme: Any, worker: int | None = None) -> Attachment:
    """The attachment to the arena of a message's model, moved to the version that the message announces.

    It is the one that there is already, if that one is to the arena that the sender named last. `worker`: the index of
    this worker, where the sender gives it none.

    Raises ValueError for weights that came by value, ProtocolError when the sender never named an arena, else as
    Subscriber() and Attachment.move_to() do.
    """
    kind, model_id, content, _ = message
    if kind == REGISTER:
        inbox.registered[model_id] = content.handle, getattr(content, "worker", worker)
    elif type(content) is not int:
        raise ValueError(f"weights of {model_id!r} came through the pipe; use SharedMemWeightSyncScheme on both sides")
    if model_id not in inbox.registered:
        raise ProtocolError(
            f"{model_id!r} was never registered here; keep one receiver for each model, and let it see every message "
            "of the pipe"
        )
    handle, index = inbox.registered[model_id]
    made: Attachment | None = inbox.attachments.get(model_id)
    if made is None or made.made_of != (handle, scheme.consistency, scheme.timeout, scheme.partial):
        earlier, made = made, Attachment(handle, scheme, index)
        if earlier is not None:
            earlier.close()  # a module is bound to one arena
        inbox.attachments[model_id] = made
    if kind != REGISTER:
        made.move_to(content)
    return made


def _close_unused(subscriber: Subscriber, bound: list[weakref.ref[nn.Module]]) -> None:
    if not any(module() is not None for module in bound):  # else its guard keeps the subscriber, and needs it
        subscriber.close()
