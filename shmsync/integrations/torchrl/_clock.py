"""Keeps a collector's policy_version true: a frame carries the version of the weights that chose its action.

TorchRL's PolicyVersion transform stamps a frame after the environment's step with the version that is current then.
Weights may be newer by that time, when they moved between the forward and the stamp. So the transform's number moves on
only when no frame is between the two. And a frame's root entry, which TorchRL carries over from the step before, is
corrected before a forward that uses a newer version.
"""

from __future__ import annotations

import threading
from typing import Any

from tensordict import TensorDictBase

_KEY = "policy_version"


class VersionClock:
    """The policy version of one leaf collector. Without a tracker it does nothing."""

    def __init__(self) -> None:
        self._tracker: Any = None
        self._lock = threading.Lock()
        self._owed = 0  # updates that the tracker does not show yet
        self._in_flight = False  # a forward has begun whose frame is not stamped
        self._stamped: Any = None

    def follow(self, tracker: Any) -> None:
        """Drive this transform; None: there is none (any more)."""
        if tracker is self._tracker or (tracker is not None and not hasattr(tracker, "increment_version")):
            return
        self._tracker = tracker
        self._in_flight = False
        if tracker is not None:
            self._settle()
            self._stamped = tracker.version
            self._step = tracker._step
            tracker._step = self._stamp  # in this worker's own transform

    def moved(self, updates: int) -> None:
        """The weights are that many updates newer. Any thread."""
        with self._lock:
            self._owed += updates
            if self._tracker is not None and not self._in_flight:
                self._settle()

    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """The thread that collects is about to use the weights that are there, on these inputs."""
        if self._tracker is None:
            return
        with self._lock:
            self._settle()
            self._in_flight = True
            version = self._tracker.version
        if version != self._stamped and inputs and isinstance(inputs[0], TensorDictBase):
            if _KEY in inputs[0].keys():  # noqa: SIM118  # a TensorDict iterates over its batch
                self._step(None, inputs[0])
            self._stamped = version

    def _stamp(self, tensordict: Any, next_tensordict: Any) -> Any:
        with self._lock:
            self._stamped = self._tracker.version
            result = self._step(tensordict, next_tensordict)
            if tensordict is not None:  # None: a reset, which ends no frame
                self._in_flight = False
                self._settle()
            return result

    def _settle(self) -> None:
        for _ in range(self._owed):
            self._tracker.increment_version()
        self._owed = 0
