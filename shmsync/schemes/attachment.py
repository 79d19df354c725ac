"""A worker's side of shared memory: its attachment to the arena of one model, and the receiver that binds the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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

    Attributes:
        handle: of the arena; None before use(), and after close().
        subscriber: to it.
    """

    handle: Handle | None = None
    subscriber: Subscriber

    @property
    def version(self) -> int:
        """The version that the calling thread used last, else the applied one; 0 without an arena."""
        return 0 if self.handle is None else self.subscriber.version

    def use(self, handle: Handle, worker: int | None, version: int, scheme: Any, model: Any = None) -> None:
        """Let the model use an arena, which takes the place of an earlier one, at this version or a later one.

        Args:
            handle: of the arena.
            worker: the index by which the sender names this worker.
            version: 0: the one that the arena has.
            scheme: has `consistency`, `timeout` and `partial`.
            model: a module is bound for good, anything else gets a copy; None: the subscriber alone is used.

        Raises as Subscriber() does, ManifestMismatch when the model does not fit a new arena: then the earlier one
        stays. Raises ProtocolError when the arena does not have the version.
        """
        if self.handle != handle:
            made = Subscriber(handle, consistency=scheme.consistency, worker=worker, timeout=scheme.timeout)
            try:
                if isinstance(model, nn.Module):
                    arena = reader_of(made).arena
                    copies = lies_elsewhere(model, arena.torch_device)
                    fit_of(bindable(model), arena, made.name, copies=copies)
                elif model is not None:
                    with made.read() as section:
                        WeightStrategy(partial=scheme.partial).check_weights(model, section.weights)
                self.close()  # a module is bound to one arena
            except BaseException:
                made.close()  # an arena that nobody can use is made anew
                raise
            self.handle, self.subscriber = handle, made
            self._bound: weakref.ref[nn.Module] | None = None  # its guard keeps the subscriber
        reader = reader_of(self.subscriber)
        if version:
            self.subscriber.refresh()
        if reader.applied_version < version:
            where = "inside a read section of this thread" if reader.in_section else "in the arena that is known here"
            raise ProtocolError(
                f"version {version} was announced, but {where} it is {reader.applied_version}. Receive outside of "
                "sections; if the scheme was restarted, make a new receiver",
                version=version,
            )
        if isinstance(model, nn.Module):
            if self._bound is None or self._bound() is not model:
                bind(reader, model, calls_of(model), copies=lies_elsewhere(model, reader.arena.torch_device))
                self._bound = weakref.ref(model)
        elif model is not None:
            with self.subscriber.read() as section:
                WeightStrategy(partial=scheme.partial).apply_weights(model, section.weights)

    def close(self) -> None:
        """Leave the arena; a bound module raises ClosedError from now on. Idempotent.

        Raises WriterBusy for an arena that another thread reads; call it again then.
        """
        if self.handle is not None:
            self.subscriber.close()
            self.handle = None


def attached(inbox: Inbox, message: Message, scheme: Any, find_model: Callable[[], Any] = lambda: None) -> Attachment:
    """The attachment to the arena of a message's model, which uses the version that the message announces.

    `find_model` may raise: the arena that a message names is known by then.

    Raises ValueError for weights that came by value, ProtocolError when the sender never named an arena, else as
    `find_model` and Attachment.use() do.
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
    made: Attachment = inbox.attachments.setdefault(model_id, Attachment())
    made.use(*inbox.registered[model_id], 0 if kind == REGISTER else content, scheme, find_model())
    return made


class SharedMemReceiver(PipeReceiver):
    """Binds the model to the arena, and moves it to each version that is announced.

    The module is bound at the first receive(). From then on each forward uses the newest version.
    """

    _attachment: Attachment | None = None

    @property
    @override
    def version(self) -> int:
        """The version of the calling thread's last forward or receive(), whichever came last; else the applied one.

        Each forward uses the newest, so it may move on between two calls of receive().
        """
        return self._attachment.version if self._attachment else 0

    @override
    def _use(self, message: Message) -> None:
        self._attachment = attached(self._inbox, message, self._scheme, self._resolve_model_ref)

    @override
    def close(self) -> None:
        """Leave the arena; a bound model raises ClosedError when it is called from now on."""
        if self._attachment is not None:
            self._attachment.close()
            if self._inbox.attachments.get(self._model_id) is self._attachment:
                del self._inbox.attachments[self._model_id]
            self._attachment = None
