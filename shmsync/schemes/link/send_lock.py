"""A lock with a deadline that no interrupt leaves taken: one send at a time, one thread at a time on a transport.

A `with` over a threading.Lock has no deadline, and between acquire() and a `try` Ctrl-C may come. The native ScopedLock
gives back what was taken, wherever an interrupt lands. Threads get a lock in the order in which they came.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from ... import _native
from ...errors import WriterBusy


class SendLock:
    """The lock of one sender, of one model over one pipe, or of one transport. A copy or a pickle has a free lock."""

    def __init__(self) -> None:
        self.lock = _native.FifoLock()

    def __reduce__(self) -> tuple[type[SendLock], tuple[()]]:
        return SendLock, ()


def hold_all(send_locks: list[SendLock], deadline: float, call: str) -> _native.ScopedLock:
    """A context manager that holds all of these locks; `call` is the name of the call in its errors.

    All threads take them in one order. Raises WriterBusy at the monotonic time `deadline`, and at once where the
    same thread has one of them already: in a signal handler, or in a hook of a send that sends.
    """
    return _native.ScopedLock([each.lock for each in send_locks], deadline, *_busy(call))


@functools.cache  # each send would compose them, for an error that hardly ever comes
def _busy(call: str) -> tuple[str, str]:
    """What WriterBusy says of this call inside a send of its own thread, and where another thread was sending."""
    return (
        f"{call}() from inside a send of the same thread (a signal handler, or a hook that sends); nothing was sent. "
        "Let that send end first",
        f"another thread was sending this model all the time that {call}() had; nothing was sent. Give it more with "
        "timeout=, or send from one thread",
    )


class TryHold(_native.Scope):
    """As hold_all() with this lock, but without WriterBusy: `.taken` says whether the lock was taken."""

    def __init__(self, lock: SendLock, deadline: float) -> None:
        super().__init__()
        self._hold = hold_all([lock], deadline, "")
        self.taken = False

    def _enter(self) -> Any:
        with suppress(WriterBusy):
            self._hold.__enter__()
            self.taken = True
        return self

    def _exit(self, failed: bool) -> None:
        self._recover()

    def _recover(self) -> None:
        self._hold.__exit__(None, None, None)  # does nothing if the lock was not taken
