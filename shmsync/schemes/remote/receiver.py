"""The receiver of a scheme whose sender is on another machine, perhaps: weights come as an argument of a call."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from ...engine.timing import check_timeout
from ...errors import ClosedError, ProtocolError
from ..api import WeightReceiver
from ..lookup import Arguments
from ..subscriptions import Subscriptions
from .parcel import Announcement, Stamp, add_careful, stamp_of

if TYPE_CHECKING:
    from .scheme import RemoteScheme


class RemoteReceiver(WeightReceiver):
    """Applies what a call brought: weights, which are copied into the model, or the word that they lie in this node's
    arena, which the model is bound to then. Thread-safe: calls may come on any thread, and out of order."""

    _scheme: RemoteScheme

    def __init__(self, scheme: RemoteScheme) -> None:
        super().__init__(scheme)
        self._stamp: Stamp | None = None
        self._start()

    def _start(self) -> None:
        self._applying = threading.Lock()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # a Condition may stay locked after an interrupt
        self._closed = False
        self._handle: Any = None
        self.subscriptions = Subscriptions(consistency=self._scheme.consistency, timeout=self._scheme.timeout)

    def set_up(self, arguments: Arguments) -> None:
        """What init_on_worker() got. For the scheme."""
        self._model_id = arguments.model_id
        self._worker = arguments.get("worker_idx")
        model = arguments.model()
        self.register_model(arguments.model_id if model is None else model)
        add_careful(self)

    def takes(self, model_id: str) -> bool:
        """As in Careful: apply_weights() copies."""
        return model_id == self._model_id

    @property
    def version(self) -> int:
        """As in WeightReceiver. A model that is bound to an arena moves on by itself: each forward uses the newest."""
        subscriber = self.subscriptions.get(self._model_id)
        return subscriber.version if subscriber else self._version

    def apply_weights(self, weights: Any) -> None:
        """Make the model use weights that came from a sender; returns when it does.

        Weights older than what the model has are left out. With fan_out="node" the model is bound to shared memory,
        and nothing is copied; else the weights are copied in place, so no forward may run meanwhile.

        Raises ManifestMismatch, the errors of Subscriber; ProtocolError for plain weights after the model was bound.
        """
        stamp = stamp_of(weights)
        with self._applying:
            known = self._stamp
            if stamp and known and stamp.session == known.session and stamp.version <= known.version:
                return
            model = self._resolve_model()
            if isinstance(weights, Announcement):
                self._use_arena(weights, model)
            else:
                self._refuse_bound(model)
                self._strategy.apply_weights(model, weights)
            self._stamp = stamp or known
            self._version = stamp.version if stamp else self._version + 1
            if self._news.empty():
                self._news.put(None)

    def receive(self, timeout: float = 0.001) -> bool:
        """Has a call brought weights since the last receive()? They are applied already.

        Args:
            timeout: seconds to wait for the next ones; 0 only looks.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        while True:
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=max(0.0, min(deadline - time.monotonic(), 3600.0)))
                return True
            if time.monotonic() >= deadline:
                return False

    def close(self) -> None:
        """Leave the arena; a bound model raises ClosedError when it is called from now on."""
        with self._applying:
            self._closed = True  # a call that is still on its way would attach again
            self.subscriptions.close()

    def _use_arena(self, announcement: Announcement, model: Any) -> None:
        if self._closed:
            raise ClosedError("this worker's scheme was shut down; make a new one")
        if self._handle != announcement.handle:  # the first, or of a relay that took another's place
            self.subscriptions.switch(self._model_id, announcement.handle, self._worker, model)
            self._handle = announcement.handle
        self.subscriptions.use(self._model_id, announcement.stamp.version, model)

    def _refuse_bound(self, model: Any) -> None:
        if self._handle is not None and isinstance(model, nn.Module):
            raise ProtocolError(
                f"{self._model_id!r} is bound to this node's shared memory, which is read-only, by an earlier send "
                'with fan_out="node"; keep sending so, or make the worker\'s model anew'
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_applying", "_news", "_handle", "subscriptions"):
            state.pop(name)
        return {**state, "_stamp": None, "_version": 0}  # a copy has not got them

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
