"""The receiver of a scheme whose sender is on another machine, perhaps: weights come as an argument of a call."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import Any

from torch import nn
from typing_extensions import override

from ...engine.deadlines import deadline_after
from ...engine.subscriber import reader_of
from ...errors import ClosedError, ProtocolError
from ..arenas.subscriptions import Subscriptions
from ..context_args import Arguments, named_content
from ..link.timed_queue import TimedQueue
from ..receiver import WeightReceiver
from .packed_weights import Announcement, Stamp, allow_views, stamp_of

_receivers: weakref.WeakSet[RemoteReceiver] = weakref.WeakSet()  # of this process


class RemoteReceiver(WeightReceiver):
    """Applies what a call brought: weights, which it copies, or news of this node's arena, to which it binds the model.

    Thread-safe: calls may come on any thread, and out of order.

    Args:
        scheme: the RemoteScheme that makes it.
    """

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._stamp: Stamp | None = None
        self._version = 0
        self._applying = threading.Lock()
        self._news: TimedQueue[None] = TimedQueue()  # a Condition may stay locked after an interrupt
        self._closed = False
        self._handle: Any = None
        self.subscriptions = Subscriptions(consistency=self._scheme.consistency, timeout=self._scheme.timeout)

    @override
    def set_up(self, arguments: Arguments) -> None:
        self._take_worker(arguments)
        model = arguments.model()
        self._register_model(arguments.model_id if model is None else model)
        allow_views(self, self._model_id)  # apply_weights() copies them
        _receivers.add(self)

    @property
    def version(self) -> int:
        """The version that the model uses now; 0: as it came.

        Bound to an arena (fan_out="node"), each forward uses the newest. Then it is the version of the calling thread's
        last forward or receive(), whichever came last; in a thread without one, the applied version.
        """
        subscriber = self.subscriptions.get(self._model_id)
        return subscriber.version if subscriber else self._version

    def apply_weights(self, weights: Any) -> None:
        """Make the model use weights that came from a sender; returns when it does.

        Weights older than what the model has are left out. With fan_out="node" the model is bound to shared memory,
        and nothing is copied; else the weights are copied in place, so no forward may run meanwhile.

        Raises ManifestMismatch, the errors of Subscriber; ProtocolError for weights of another model, and for plain
        weights after the model was bound.
        """
        weights = named_content(weights, self._model_id)
        stamp = stamp_of(weights)
        if stamp is not None and stamp.model_id != self._model_id:
            known_ids = sorted({receiver.model_id for receiver in list(_receivers)})
            raise ProtocolError(
                f"these weights are of {stamp.model_id!r}, but were given to the receiver of {self._model_id!r}; this "
                f"process has receivers of {', '.join(map(repr, known_ids))}. Give them to the right one, or make one "
                f"with init_on_worker({stamp.model_id!r})"
            )
        with self._applying:
            known = self._stamp
            if stamp and known and stamp.session == known.session and stamp.version <= known.version:
                return
            model = self._resolve_model_ref()
            if isinstance(weights, Announcement):
                self._use_arena(weights, model)
            else:
                if self._handle is not None and isinstance(model, nn.Module):
                    raise ProtocolError(
                        f"{self._model_id!r} is bound to this node's shared memory, which is read-only, by an earlier "
                        'send with fan_out="node"; keep sending so, or make a new model in the worker'
                    )
                self._strategy.apply_weights(model, weights)
            self._stamp = stamp or known
            self._version = stamp.version if stamp else self._version + 1
            if self._news.empty():
                self._news.put(None)

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Has a call brought weights since this was last asked? They are applied already.

        Args:
            timeout: seconds to wait for the next ones; 0 only looks, None is the scheme's.
        """
        self._scheme.check_open("receive")
        deadline = deadline_after(timeout, self._scheme.timeout)
        try:
            self._news.get(deadline - time.monotonic())
        except queue.Empty:
            return False
        subscriber = self.subscriptions.get(self._model_id)
        if subscriber is not None:
            reader_of(subscriber).use_applied_version()
        return True

    def close(self) -> None:
        """Leave the arena; a bound model raises ClosedError when it is called from now on."""
        with self._applying:
            self._closed = True  # a call that is still on its way would attach again
            self.subscriptions.close()

    def _use_arena(self, announcement: Announcement, model: Any) -> None:
        if self._closed:
            raise ClosedError("this worker's scheme was shut down; make a new one")
        if self._handle != announcement.handle:  # the first, or of a relay that took another's place
            self.subscriptions.switch(self._model_id, announcement.handle, self._worker_idx, model)
            self._handle = announcement.handle
        self.subscriptions.use(self._model_id, announcement.stamp.version, model)
