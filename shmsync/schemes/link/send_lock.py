"""Locks with a deadline that no interrupt leaves taken: one send at a time, one thread at a time on a transport.

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
from .timed_queue import TimedQueue

# How long the thread that comes first in the queue may need to wake. Only a hint: an interrupt may leave in the queue
# somebody who is gone.
_HEAD_START = 0.005


class TransportLock:
    """The lock.

    Args:
        what: it belongs to, for the errors.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.lock = _native.WriterLock()
        self.holder: LockHold | None = None  # the one that had it last
        self.queue: deque[LockHold] = deque()

    def hold(self, deadline: float, *, refuse: bool = True) -> LockHold:
        """A context manager. Inside, no other thread has the lock.

        `with` raises WriterBusy when another thread has it until the deadline, and at once when this thread has it
        already. With refuse=False it does not raise: look at `.taken`.
        """
        return LockHold(self, deadline, refuse)


class LockHold(_native.Scope):
    """One use of the lock."""

    def __init__(self, lock: TransportLock, deadline: float, refuse: bool) -> None:
        super().__init__()
        self._transport_lock = lock
        self._refuse = refuse
        self._bell: TimedQueue[None] = TimedQueue()
        self.deadline = deadline
        self.thread = threading.get_ident()
        self.taken = False

    def _enter(self) -> Any:
        lock = self._transport_lock
        holder = lock.holder
        if holder is not None and holder.thread == self.thread and lock.lock.held_by(holder):
            self._fail("is in the middle of another call of this thread, which this one interrupts; call it afterwards")
        elif lock.queue or not self._take():
            self._queue_up()
        return self

    def _queue_up(self) -> None:
        self._transport_lock.queue.append(self)
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
            self._transport_lock.lock.acquire(self)
        except WriterBusy:
            return False
        self._transport_lock.holder = self
        self.taken = True
        return True

    def _fail(self, why: str) -> None:
        if self._refuse:
            raise WriterBusy(f"{self._transport_lock.what} {why}. Nothing was sent")

    def _exit(self, failed: bool) -> None:
        self._recover()

    def _recover(self) -> None:
        self._transport_lock.lock.release(self)  # does nothing if another one has it
        self._leave()
        with contextlib.suppress(IndexError):
            self._transport_lock.queue[0]._bell.put(None)

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):
            self._transport_lock.queue.remove(self)
        now = time.monotonic()
        with contextlib.suppress(IndexError, ValueError):
            while (first := self._transport_lock.queue[0]).deadline < now:  # an interrupt has left it there
                self._transport_lock.queue.remove(first)


class SendLock:
    """The lock of one sender, or of one model over one pipe. A copy or a pickle has a lock that is free."""

    def __init__(self) -> None:
        self.lock = _native.TurnLock()

    def __reduce__(self) -> tuple[type[SendLock], tuple[()]]:
        return SendLock, ()


def hold_all(send_locks: list[SendLock], deadline: float, call: str) -> _native.Turn:
    """A context manager that holds all of these locks; `call` is the name of the call in its errors.

    All threads take them in one order. Raises WriterBusy at the monotonic time `deadline`, and at once where the
    same thread has one of them already: in a signal handler, or in a hook of a send that sends.
    """
    return _native.Turn([each.lock for each in send_locks], deadline, call)
