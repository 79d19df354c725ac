"""The policy_version of frames: that of the weights which chose the action.

TorchRL's tracker (its PolicyVersion transform) stamps a frame after the environment's step with the version that is
current then. Weights may be newer by that time. So the tracker's number moves on when a frame is stamped, up to the
version that the collecting thread's last forward used, which the engine knows for each thread. A frame's root entry is
carried over from the step before, so it is stamped again after the number has changed.
"""

from __future__ import annotations

import weakref
from typing import Any

from tensordict import TensorDictBase

from ...engine.read.reading import ReadPath

_VERSION = "policy_version"
FIRST = 1  # the version that arenas start with; each later one is an update


class FrameStamp:
    """Replaces _step() of a leaf collector's tracker.

    Args:
        collector: with a tracker.
        reader: of the policy's weights.
    """

    def __init__(self, collector: Any, reader: ReadPath) -> None:
        self._tracker: Any = collector.policy_version_tracker
        self._collector, self._reader = weakref.ref(collector), reader
        self._counted, self._stamped = FIRST, self._tracker.version
        self._tracker._step = self

    def __call__(self, tensordict: Any, next_tensordict: Any) -> Any:
        """Stamp a frame, after the environment's step or reset."""
        tracker = self._tracker
        step = _own_step(tracker)
        if tensordict is not None:  # None: a reset, perhaps of some environments, which ends no frame
            used, before = self._reader.used_version, self._counted
            self._counted = max(used, before)
            for _ in range(used - before):
                tracker.increment_version()
            if tracker.version != self._stamped:
                self._stamped = tracker.version
                # With devices the collector's own TensorDict is another one than the environment's input.
                for root in (tensordict, getattr(self._collector(), "_carrier", None)):
                    if isinstance(root, TensorDictBase) and _VERSION in root.keys():  # noqa: SIM118  # iterates over its batch
                        step(None, root)
        return step(tensordict, next_tensordict)

    def __reduce__(self) -> Any:  # a copy of the environment belongs to no collector, and has its own tracker
        return _own_step, (self._tracker,)


def _own_step(tracker: Any) -> Any:
    return type(tracker)._step.__get__(tracker)
