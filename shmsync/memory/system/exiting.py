"""The end of the process, and the daemon threads that it leaves behind in the middle of a call.

At exit the handles of this process are closed in the main thread, while daemon threads run on: they would find their
arena closed under them, and print an error into the end of a program that has done nothing wrong.
"""

from __future__ import annotations

import atexit
import threading
import time
from multiprocessing import util

_PATIENCE = 5.0  # seconds: an exit takes less, and a call may wait for the thread

_exiting = False
_mark: util.Finalize | None = None


def watch_exit() -> None:
    """Notice the exit of this process before anything is closed. Call it after each handle that closes itself then."""
    global _mark
    atexit.unregister(_begin)  # what was registered last is called first
    atexit.register(_begin)
    if _mark is None or not _mark.still_active():  # a child of multiprocessing knows this way only, and forgets it once
        _mark = util.Finalize(None, _begin, exitpriority=1000)


def _begin() -> None:
    global _exiting
    _exiting = True


def exiting() -> bool:
    """Has this process begun to exit?"""
    return _exiting


def stay_if_exiting() -> None:
    """Keep a daemon thread here while the process exits. Other threads return: the exit waits for them."""
    if _exiting and threading.current_thread().daemon:
        time.sleep(_PATIENCE)
