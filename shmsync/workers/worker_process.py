"""What runs in a worker process of Workers or of a collector: set up, watched, and its exceptions reported.

A worker of Workers has a Subscriber, whose waits end when the trainer leaves.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from ..engine.outcome import Failure
from ..engine.subscriber import Subscriber, reader_of
from ..errors import ClosedError
from ..memory.arena import sessions_read, show_failure
from ..memory.process import Peer, dead_parent
from ..memory.segment import Handle

ATTACHED = "attached"  # it uses these arenas
FAILED, RETURNED = "failed", "returned"  # the last word of a worker

_BETWEEN_LOOKS = 1.0  # seconds
_GRACE = 5.0  # seconds from the trainer's death to the worker's: one that notices it itself ends in its own way
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def run(trainer: int, threads: int, seed: int, body: Callable[..., object], packed: Any, control: Connection) -> None:
    """Call `body(closing, control, *args)` in this process, and report what it raises. `trainer`: its owner word.

    What `closing` has is closed after the report: that may take long, and the trainer knows why a worker is leaving.
    """
    # Ctrl-C in a terminal reaches every process of the group. The trainer decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process().daemon = False  # a daemon may have no children, as a DataLoader's
    threading.Thread(target=_end_after, args=(trainer,), name="shmsync-watcher", daemon=True).start()
    _end_children_too(control)
    torch.set_num_threads(threads)
    # Each worker has random numbers of its own: those from one fork server would all draw the same.
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    closing, failed = ExitStack(), False
    for step in (lambda: body(closing, control, *packed.load()), closing.close):
        try:
            step()
        except BaseException as error:
            failed = True
            if dead_parent() is None:
                _report(error, control)
    if failed:
        sys.exit(1)
    with suppress(OSError):  # the trainer is gone
        control.send((RETURNED, None))


def _report(error: BaseException, control: Connection) -> None:
    """Print what was just caught to stderr, and send it to the trainer."""
    failure = Failure.of(error)
    with suppress(OSError, ValueError):  # stderr is closed
        print(f"{multiprocessing.current_process().name} (pid {os.getpid()}) failed:", file=sys.stderr)
        print(failure.trace, end="", file=sys.stderr, flush=True)
    _show(f"failed: {type(error).__name__}")
    with suppress(OSError):  # the trainer is gone
        control.send((FAILED, failure))


def attached(control: Connection) -> None:
    """This worker has its weights: tell the trainer where, and take back how one in its place has failed."""
    _show("")
    control.send((ATTACHED, sessions_read()))


def _show(failure: str) -> None:
    """Let `shmsync list` show how this worker failed, beside the arenas that it reads."""
    who = multiprocessing.current_process().name.removeprefix("shmsync-").replace("-", " ")
    show_failure(who, failure, sessions_read())


def _end_after(trainer: int) -> None:
    """Wait for the trainer's death, then end this process and its children, whatever they do."""
    peer = Peer(owner=trainer)
    while not peer.dead:
        time.sleep(_BETWEEN_LOOKS)
    time.sleep(_GRACE)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _end_children_too(control: Connection) -> None:
    """Let the kernel end forked children when this process dies: a busy one would not notice.

    The kernel does so when the thread ends that has forked the child, so only for those of the main thread.
    """
    prctl = ctypes.CDLL(None).prctl
    in_main = False

    def before() -> None:
        nonlocal in_main
        in_main = threading.get_native_id() == os.getpid()

    def after() -> None:
        control.close()  # or the trainer would not see its end while a child of a dead worker lives
        if in_main:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(before=before, after_in_child=after)


def attach_and_work(
    closing: ExitStack, control: Connection, handle: Handle, rank: int, work: Callable[..., object], *args: Any
) -> None:
    """The body of a worker of Workers: the user's function, with a Subscriber. The trainer's end ends its waits."""
    sub = Subscriber(handle, worker=rank, timeout=math.inf)
    closing.callback(sub.close)
    reader = reader_of(sub)
    # The trainer's only message says that it leaves, and stays unread. A dead trainer's pipe shows its end there.
    reader.left = lambda: control.poll() and not reader.gone
    attached(control)
    try:
        work(sub, *args)
    except ClosedError:
        if not reader.left():
            raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
