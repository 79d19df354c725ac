"""Keeps a collector's policy_version true: a frame carries the version of the weights that chose its action.

TorchRL's PolicyVersion transform stamps a frame after the environment's step with the version that is current then.
Weights may be newer by that time, when they moved between the forward and the stamp. So the transform's number moves on
only when no frame is between the two. A frame's root entry is carried over from the step before, so it is corrected
before a forward that uses a newer version: in the policy's input, and in the collector's own TensorDict, which is
another one when devices are given.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from .... import _native

_KEY = "policy_version"


class VersionClock:
    """The policy version of one leaf collector. Does nothing without a tracker (TorchRL's PolicyVersion).

    `flight` is set by the native half of the policy's cover: `under_way` when a forward begins. A frame without an
    update before it costs no more than to set that back.
    """

    def __init__(self) -> None:
        self.flight = _native.Flight()  # under_way: a forward has begun whose frame is not stamped; due: see moved()
        self._tracker: Any = None
        self._lock = threading.Lock()
        self._uncounted = 0  # updates that the tracker does not show yet
        self._handler: Callable[[], Any] | None = None

    def on_update(self, handler: Callable[[], Any]) -> None:
        """Call this once for each update, under the model's lock."""
        self._handler = handler
        self.moved(0)

    def follow(self, collector: Any) -> None:
        """Drive the transform of this leaf collector, if it tracks versions."""
        tracker = getattr(collector, "policy_version_tracker", None)
        self._collector = weakref.ref(collector)
        if tracker is self._tracker or (tracker is not None and not hasattr(tracker, "increment_version")):
            return
        self._tracker = tracker
        self.flight.under_way = False
        if tracker is not None:
            self._settle()
            self.flight.due = True
            self._step = tracker._step
            tracker._step = self._stamp  # in this worker's own transform

    def moved(self, updates: int) -> None:
        """Note that the weights are that many updates newer. Any thread may call it that holds the model's lock."""
        with self._lock:
            self._uncounted += updates
        while self._handler is not None and self._uncounted:
            self._uncounted -= 1
            self._handler()
        with self._lock:
            if self._tracker is None:
                return
            self.flight.due = True  # roots that were stamped before are old now
            if not self.flight.under_way:
                self._settle()

    @torch._dynamo.disable
    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """Called by the collecting thread before the policy's forward on these inputs, if it is due."""
        self.flight.due = False
        if self._tracker is None:
            return
        with self._lock:
            self._settle()
        for td in (*inputs[:1], getattr(self._collector(), "_carrier", None)):
            if isinstance(td, TensorDictBase) and _KEY in td.keys():  # noqa: SIM118  # it iterates over its batch
                self._step(None, td)

    def _stamp(self, tensordict: Any, next_tensordict: Any) -> Any:
        result = self._step(tensordict, next_tensordict)
        if tensordict is not None:  # None: a reset, perhaps of some environments, which ends no frame
            self.flight.under_way = False
            if self._uncounted:  # after the flag: moved() looks at it after it has added to this
                with self._lock:
                    self._settle()
        return result

    def _settle(self) -> None:
        for _ in range(self._uncounted):
            self._tracker.increment_version()
        self._uncounted = 0


class OwnVersions:
    """The policy version of a collector of one process, which counts it itself, after the weights were applied.

    Its next frame carries the version of the frame before as its root entry; so the root is stamped again when the
    number has changed since.
    """

    def __init__(self, collector: Any) -> None:
        self._collector: weakref.ref[Any] | None = weakref.ref(collector)
        self._tracker = collector.policy_version_tracker
        self._stamped = self._tracker.version
        self._tracker._step = self._stamp

    def _stamp(self, tensordict: Any, next_tensordict: Any) -> Any:
        tracker = self._tracker
        if tensordict is not None and self._stamped != tracker.version:  # None: a reset, which ends no frame
            self._stamped = tracker.version
            collector = None if self._collector is None else self._collector()
            for td in (tensordict, getattr(collector, "_carrier", None)):
                if isinstance(td, TensorDictBase) and _KEY in td.keys():  # noqa: SIM118  # it iterates over its batch
                    type(tracker)._step(tracker, None, td)
        return type(tracker)._step(tracker, tensordict, next_tensordict)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_collector": None}  # of a copy of the environment, which belongs to no collector
