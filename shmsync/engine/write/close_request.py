"""close() beside a call of another thread: a call that waits ends with ClosedError and gives the writer's lock up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ... import _native
from ...memory.system.exiting import stay_if_exiting


class CloseRequest:
    """Hands the writer's lock from a thread that waits with it to the one that wants to close the arena."""

    def __init__(self, lock: _native.WriterLock) -> None:
        self._lock = lock
        self._requests: list[object] = []
        self._taken = False  # by the wait that is under way
        self.waiting_thread: int | None = None  # the holder of the lock, while it waits for readers or acks

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The calling thread, which holds the lock, waits for readers or acks in here and asks pending()."""
        self._taken = False
        self.waiting_thread = threading.get_ident()
        try:
            yield
        finally:
            self.waiting_thread = None

    def pending(self) -> bool:
        """In each slice of a wait: must it end, since another thread closes the arena?"""
        stay_if_exiting()
        if self._requests and not self._taken:
            with suppress(IndexError):  # close() has taken it back
                self._requests.pop()
                self._taken = True
        return self._taken

    @contextmanager
    def exclusive(self, deadline: float) -> Iterator[None]:
        """Hold the lock for close(), after the wait of another thread has ended; at most until the monotonic deadline.

        Raises WriterBusy as long as no wait has been ended: one that ended with ClosedError is followed by the close.
        """
        request = object()
        mine = self._lock.reserve(request)  # what a waiter gives up goes to close(), and not to a third thread
        try:
            if mine and self._others_wait():
                self._requests.append(request)
                while request in self._requests and self._others_wait() and time.monotonic() < deadline:
                    time.sleep(0.0005)
                try:
                    self._requests.remove(request)
                except ValueError:  # taken: that wait ends with ClosedError, so the close must follow
                    while self._lock.locked():
                        time.sleep(0.0005)
            self._lock.acquire(request)
            yield
        finally:
            if mine:
                self._requests.clear()
            self._lock.forgo(request)
            self._lock.release(request)

    def _others_wait(self) -> bool:
        return self._lock.locked() and self.waiting_thread not in (None, threading.get_ident())
