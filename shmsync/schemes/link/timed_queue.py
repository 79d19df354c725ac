"""A queue between threads whose get() keeps its deadline."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """First in, first out. put() never waits, and may be called anywhere: in finalizers and handlers of signals too.

    queue.SimpleQueue promises the same, but its get(timeout=) may never return. When its lock is left from an earlier
    put(), and the time ends just after it was taken, CPython (3.7 to 3.14) goes on with a negative timeout, which means
    no timeout. Short timeouts on a busy machine are enough.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = threading.Lock()  # free: something may be there. An interrupt may lose a ring, and never an item
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def get(self, timeout: float | None = None) -> T:
        """The oldest item. Waits for one for `timeout` seconds, None: without limit. Raises queue.Empty."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._items:
                with contextlib.suppress(IndexError):  # another thread was quicker
                    item = self._items.popleft()
                    if self._items:
                        self._ring()  # another thread may wait, too
                    return item
            rest = -1.0 if end is None else min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._bell.acquire(timeout=rest) and not self._items:
                raise queue.Empty

    def empty(self) -> bool:
        """Is nothing there?"""
        return not self._items
