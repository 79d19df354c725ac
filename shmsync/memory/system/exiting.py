"""The end of the process, while daemon threads of it are in the middle of a call.

At exit the handles of this process are closed in the main thread. A daemon thread would find its arena closed under it,
and print an error into the end of a program that has done nothing wrong. So it ends itself, without a word.
"""

from __future__ import annotations

import atexit
import threading
from multiprocessing import util

_exiting = False
_first: util.Finalize | None = None


def watch_exit() -> None:
    """Notice the exit of this process before anything is closed. Call it after each handle that closes itself then."""
    global _first
    atexit.unregister(_begin)  # what was registered last is called first
    atexit.register(_begin)
    if (
        _first is None or not _first.still_active()
    ):  # a child of multiprocessing knows this way only, and forgets it once
        _first = util.Finalize(None, _begin, exitpriority=1000)


def _begin() -> None:
    global _exiting
    _exiting = True


def exiting() -> bool:
    """Has this process begun to exit?"""
    return _exiting


def stay_if_exiting() -> None:
    """End a daemon thread while the process exits. Other threads return: the exit waits for them."""
    if _exiting and threading.current_thread().daemon:
        raise SystemExit  # threading prints nothing of it
