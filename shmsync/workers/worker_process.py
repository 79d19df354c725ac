"""What runs in a worker process of Workers or of a collector: set up, watched, and its exceptions reported.

A worker of Workers has a Subscriber, whose waits end when the trainer leaves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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


class _Reported(SystemExit):
    """The trainer has been told what failed; this process ends with exit code 1."""


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
    with _reported(control), ExitStack() as closing, _reported(control):
        body(closing, control, *packed.load())
    with suppress(OSError):  # the trainer is gone
        control.send((RETURNED, None))


@contextmanager
def _reported(control: Connection) -> Iterator[None]:
    """Print what is raised inside to stderr and send it to the trainer, unless that has died; then end the process."""
    try:
        yield
    except _Reported:
        raise
    except BaseException as error:
        if dead_parent() is None:
            failure = Failure.of(error)
            with suppress(OSError, ValueError):  # stderr is closed
                print(f"{multiprocessing.current_process().name} (pid {os.getpid()}) failed:", file=sys.stderr)
                print(failure.trace, end="", file=sys.stderr, flush=True)
            _show(f"failed: {type(error).__name__}")
            with suppress(OSError):  # the trainer is gone
                control.send((FAILED, failure))
        raise _Reported(1) from None


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
    """The body of a worker of Workers: the user's function, with a Subscriber."""
    sub = _WorkerSubscriber(handle, rank, control)
    closing.callback(sub.close)
    attached(control)
    try:
        work(sub, *args)
    except ClosedError:
        if not sub.left:
            raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


class _WorkerSubscriber(Subscriber):
    """A Subscriber whose waits and versions() also end when the trainer leaves Workers."""

    def __init__(self, handle: Handle, worker: int, orders: Connection) -> None:
        self._orders = orders
        self._left = False
        super().__init__(handle, worker=worker, timeout=float("inf"))  # the trainer's end or order ends each wait
        reader_of(self).look_also = self._check_left

    @property
    def left(self) -> bool:
        """Has the trainer left Workers? Its only message says so, and stays unread."""
        if not self._left:
            self._left = self._orders.poll() and super().publisher_alive  # a dead trainer's pipe shows its end there
        return self._left

    @property
    def publisher_alive(self) -> bool:
        """As a Subscriber's; False too once the trainer has left Workers. So a loop that never waits can end."""
        return super().publisher_alive and not self.left

    def versions(self, timeout: float | None = None) -> Iterator[int]:
        """As a Subscriber's; also ends when the trainer leaves Workers, after the last version before that."""
        for version in super().versions(timeout):
            last = self.left
            yield version  # also when the trainer has left: it may have waited for the ack of this version
            if last:  # another thread of the trainer may go on publishing
                return

    def _check_left(self) -> None:
        if self.left:
            raise ClosedError(f"the trainer has left the Workers of arena {self.name!r}; let this worker return")
