"""A queue between workers and trainer whose get() in the trainer does not wait for workers that have failed."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from multiprocessing import queues
from typing import Any

from ..errors import ProtocolError

_SLICE = 0.05  # seconds
_LAST = 0.2  # seconds: what a worker put before it returned is in the pipe, and the queue's lock may be taken


class WorkerQueue(queues.Queue):
    """A multiprocessing.Queue; made by Workers.queue().

    In the trainer get() raises WorkerFailed or WorkerDied, once each, and ProtocolError when the queue is empty and no
    worker runs. Else it is as in the standard library: without a `timeout` it waits without limit, and raises
    queue.Empty at the end of one.
    """

    def __init__(self, maxsize: int, context: Any, look: Callable[[], bool]) -> None:
        super().__init__(maxsize, ctx=context)
        self._look = look  # raises failures; False: no worker runs. It stays here: a pickled queue has none

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item. Raises queue.Empty, WorkerFailed, WorkerDied, ProtocolError."""
        look = getattr(self, "_look", None)
        if look is None:
            return super().get(block, timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            running = look()
            left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
            try:
                if not block or left <= 0:
                    return super().get(False)
                return super().get(True, left if running else _LAST)
            except queue.Empty:
                if not block or left <= 0:
                    raise
            if not running:
                raise ProtocolError(
                    "the queue is empty, and no worker runs that could fill it; workers.restart(rank) starts one"
                )
