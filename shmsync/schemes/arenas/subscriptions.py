"""The worker's side of the shared-memory scheme: one subscriber for each model."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

from ...engine.bind.binding import ModuleCheck
from ...engine.bind.guard import bind
from ...engine.bind.guarded_methods import can_be_called
from ...engine.subscriber import Consistency, Subscriber, reader_of
from ...errors import ProtocolError
from ...memory.segment import Handle
from ..strategy import WeightStrategy


class Subscriptions:
    """Subscribers by model id, and the models that they are bound to."""

    def __init__(self, *, consistency: Consistency, timeout: float, partial: bool = False) -> None:
        self._strategy = WeightStrategy(partial=partial)
        self._consistency = consistency
        self._timeout = timeout
        self._handles: dict[str, tuple[Handle, int | None]] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._bound: dict[str, weakref.ref[nn.Module]] = {}
        # A scheme of this shape has no close(), so collecting it is the normal end, and no reason to warn.
        self._finalizer = weakref.finalize(self, _close_unused, self._subscribers, self._bound)

    def join(self, model_id: str, handle: Handle, worker: int | None) -> None:
        """Attach to an arena, in place of the model's earlier one, as the worker of this index."""
        self._handles[model_id] = handle, worker
        subscriber = Subscriber(handle, consistency=self._consistency, worker=worker, timeout=self._timeout)
        earlier = self._subscribers.pop(model_id, None)
        self._bound.pop(model_id, None)
        self._subscribers[model_id] = subscriber
        if earlier is not None:
            earlier.close()

    def switch(self, model_id: str, handle: Handle, worker: int | None, model: Any) -> None:
        """Attach to another arena and bind the model to it; if either fails, everything stays as it was.

        Other threads may use the model: no forward runs while its parameters move.
        """
        earlier = self._subscribers.get(model_id)
        subscriber = Subscriber(handle, consistency=self._consistency, worker=worker, timeout=self._timeout)
        try:
            if isinstance(model, nn.Module):
                _bind(subscriber, model, instead_of=earlier)
                self._bound[model_id] = weakref.ref(model)
        except BaseException:
            subscriber.close()
            raise
        self._handles[model_id] = handle, worker
        self._subscribers[model_id] = subscriber
        if earlier is not None:
            earlier.close()

    def get(self, model_id: str) -> Subscriber | None:
        """The subscriber of a model, if it has one."""
        return self._subscribers.get(model_id)

    def needed(self, model_id: str) -> Subscriber:
        """The subscriber of a registered model. Attaches again if an earlier attempt failed.

        Raises ProtocolError for a model that was never registered.
        """
        if model_id not in self._subscribers:
            if model_id not in self._handles:
                raise ProtocolError(
                    f"{model_id!r} was never registered here; keep one receiver for each model, and let it see every "
                    "message of the pipe"
                )
            self.join(model_id, *self._handles[model_id])
        return self._subscribers[model_id]

    def bind(self, model_id: str, model: Any) -> None:
        """Let the model use the arena: a module for good, anything else gets a copy of this version."""
        subscriber = self.needed(model_id)
        if not isinstance(model, nn.Module):
            with subscriber.read() as section:
                self._strategy.apply_weights(model, section.weights)
        elif (bound := self._bound.get(model_id)) is None or bound() is not model:
            self._strategy.check_destination(model)
            _bind(subscriber, model)
            self._bound[model_id] = weakref.ref(model)

    def use(self, model_id: str, version: int, model: Any) -> None:
        """Make the model use this version, or a later one. Raises ProtocolError if the arena does not have it."""
        subscriber = self.needed(model_id)
        self.move_to(subscriber, version)
        applied = reader_of(subscriber).applied_version
        if applied < version:
            raise ProtocolError(
                f"{model_id!r} is at version {applied} in the arena that this worker knows, not at "
                f"{version}; was the scheme restarted? Make a new receiver",
                version=version,
            )
        bound = self._bound.get(model_id)
        if bound is None or bound() is not model:
            self.bind(model_id, model)

    def move_to(self, subscriber: Subscriber, version: int) -> None:
        """Apply the newest version; on a device, when this one, which was announced already, has been copied there.

        Raises what wait_version() raises.
        """
        if reader_of(subscriber).arena.on_device is not None:
            subscriber.wait_version(version, self._timeout)
        subscriber.refresh()

    def inside_section(self, model_id: str) -> bool:
        """Is the calling thread inside a read section of this model?"""
        subscriber = self._subscribers.get(model_id)
        return subscriber is not None and reader_of(subscriber).in_section

    def close(self) -> None:
        """Leave every arena; bound modules raise ClosedError from now on. Idempotent.

        Raises WriterBusy for an arena that another thread reads; call it again then.
        """
        self._bound.clear()
        _close_unused(self._subscribers, self._bound)


def is_elsewhere(model: nn.Module, device: torch.device) -> bool:
    """Has the model tensors on another device than the arena, whose memory it then cannot use itself?"""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    return not devices <= {device}


def _bind(subscriber: Subscriber, model: nn.Module, instead_of: Subscriber | None = None) -> None:
    """Let the model show the arena's memory; on another device it gets a copy of each version, made in one section."""
    reader = reader_of(subscriber)
    check = ModuleCheck(reader.arena, reader.name, copies=is_elsewhere(model, reader.arena.device))
    earlier = None if instead_of is None else reader_of(instead_of)
    bind(reader, model, can_be_called(model), check, clones=True, instead_of=earlier)


def _close_unused(subscribers: dict[str, Subscriber], bound: dict[str, weakref.ref[nn.Module]]) -> None:
    with contextlib.ExitStack() as stack:  # one that is busy keeps none of the others, and is closed by the next call
        for model_id, subscriber in subscribers.items():
            module = bound.get(model_id)
            if module is None or module() is None:  # else its guard keeps the subscriber, and needs it
                stack.callback(subscriber.close)
    subscribers.clear()
