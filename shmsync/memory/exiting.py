"""The end of the process, and the daemon threads that it leaves behind in the middle of a call.

At exit the handles of this process are closed in the main thread, while daemon threads run on: they would find their
arena closed under them, and print an error into the end of a program that has done nothing wrong.
"""

from __future__ import annotations

import threading
import time
from multiprocessing import util

_exiting = False
_mark: util.Finalize | None = None


def watch_exit() -> None:
    """Notice the exit of this process before anything is closed. Cheap; call it wherever a handle is made."""
    global _mark
    if _mark is None or not _mark.still_active():  # children of multiprocessing forget what their parent registered
        _mark = util.Finalize(None, _begin, exitpriority=1000)


def _begin() -> None:
    global _exiting
    _exiting = True


def exiting() -> bool:
    """Has this process begun to exit?"""
    return _exiting


def stay_if_exiting() -> None:
    """Keep a daemon thread here for ever once the process exits. Other threads return: somebody waits for them."""
    if _exiting and threading.current_thread().daemon:
        while True:
            time.sleep(3600)
