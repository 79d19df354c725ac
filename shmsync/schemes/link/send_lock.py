"""Locks with a deadline that no interrupt leaves taken: one send at a time, one thread at a time on a transport.

A `with` over a threading.Lock has no deadline, and between acquire() and a `try` Ctrl-C may come. The native ScopedLock
gives back what was taken, wherever an interrupt lands. Threads get a lock in the order in which they came.
"""

from __future__ import annotations

from typing import Any

from ... import _native
from ...errors import WriterBusy


class SendLock:
    """The lock of one sender, or of one model over one pipe. A copy or a pickle has a lock that is free."""

    def __init__(self) -> None:
        self.lock = _native.FifoLock()

    def __reduce__(self) -> tuple[type[SendLock], tuple[()]]:
        return SendLock, ()


def hold_all(send_locks: list[SendLock], deadline: float, call: str) -> _native.ScopedLock:
    """A context manager that holds all of these locks; `call` is the name of the call in its errors.

    All threads take them in one order. Raises WriterBusy at the monotonic time `deadline`, and at once where the
    same thread has one of them already: in a signal handler, or in a hook of a send that sends.
    """
    return _native.ScopedLock([each.lock for each in send_locks], deadline, call)


class TransportLock:
    """The lock of one transport to another machine, with its own errors.

    Args:
        what: it belongs to, for the errors.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.lock = _native.FifoLock()

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
        self._scoped_lock = _native.ScopedLock([lock.lock], deadline, lock.what)
        self.taken = False

    def _enter(self) -> Any:
        inside = self._transport_lock.lock.mine()
        try:
            self._scoped_lock.__enter__()
            self.taken = True
        except WriterBusy:
            if self._refuse:
                why = (
                    "is in the middle of another call of this thread, which this one interrupts; call it afterwards"
                    if inside
                    else "was used by another thread all the time; call again, or give more with timeout="
                )
                raise WriterBusy(f"{self._transport_lock.what} {why}. Nothing was sent") from None
        return self

    def _exit(self, failed: bool) -> None:
        self._recover()

    def _recover(self) -> None:
        self._scoped_lock.__exit__(None, None, None)  # does nothing if the lock was not taken
