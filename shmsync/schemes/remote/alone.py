"""A lock with a deadline that no interrupt leaves taken: one thread at a time uses a transport, the others queue.

A `with` over a threading.Lock has no deadline, and between acquire() and a `try` Ctrl-C may come. Here the native Scope
gives back what was taken, wherever an interrupt lands.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Any

from ... import _native
from ...errors import WriterBusy
from ..timed_queue import TimedQueue

# How long the thread that comes first in the queue may need to wake. Only a hint: an interrupt may leave in the queue
# somebody who is gone.
_HEAD_START = 0.005


class Alone:
    """The lock.

    Args:
        what: it belongs to, for the errors.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.lock = _native.WriterLock()
        self.holder: Hold | None = None  # the one that had it last
        self.queue: deque[Hold] = deque()

    def hold(self, deadline: float, *, refuse: bool = True) -> Hold:
        """A context manager. Inside, no other thread has the lock.

        `with` raises WriterBusy when another thread has it until the deadline, and at once when this thread has it
        already. With refuse=False it does not raise: look at `.taken`.
        """
        return Hold(self, deadline, refuse)


class Hold(_native.Scope):
    """One use of the lock."""

    def __init__(self, alone: Alone, deadline: float, refuse: bool) -> None:
        super().__init__()
        self._alone = alone
        self._refuse = refuse
        self._bell: TimedQueue[None] = TimedQueue()
        self.deadline = deadline
        self.thread = threading.get_ident()
        self.taken = False

    def _enter(self) -> Any:
        alone = self._alone
        holder = alone.holder
        if holder is not None and holder.thread == self.thread and alone.lock.held_by(holder):
            self._fail("is in the middle of another call of this thread, which this one interrupts; call it afterwards")
        elif alone.queue or not self._take():
            self._queue_up()
        return self

    def _queue_up(self) -> None:
        self._alone.queue.append(self)
        while True:
            rest = self.deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._bell.get(min(rest, _HEAD_START))
            if self._take():
                break
            if rest <= 0:
                self._fail("was used by another thread all the time; call again, or give more with timeout=")
                break
        self._leave()

    def _take(self) -> bool:
        try:
            self._alone.lock.acquire(self)
        except WriterBusy:
            return False
        self._alone.holder = self
        self.taken = True
        return True

    def _fail(self, why: str) -> None:
        if self._refuse:
            raise WriterBusy(f"{self._alone.what} {why}. Nothing was sent")

    def _exit(self, failed: bool) -> None:
        self._recover()

    def _recover(self) -> None:
        self._alone.lock.release(self)  # does nothing if another one has it
        self._leave()
        with contextlib.suppress(IndexError):
            self._alone.queue[0]._bell.put(None)

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):
            self._alone.queue.remove(self)
        now = time.monotonic()
        with contextlib.suppress(IndexError, ValueError):
            while (first := self._alone.queue[0]).deadline < now:  # an interrupt has left it there
                self._alone.queue.remove(first)
