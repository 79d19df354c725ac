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
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..engine.outcome import Failure
from ..engine.subscriber import Subscriber, reader_of
from ..errors import ClosedError
from ..memory.process import Peer, dead_parent
from ..memory.segment import Handle

LEAVE = "leave"  # the trainer's word
BEGAN, ATTACHED, FAILED = "began", "attached", "failed"  # the worker's

_BETWEEN_LOOKS = 1.0  # seconds
_GRACE = 5.0  # seconds from the trainer's death to the worker's: one that notices it itself ends in its own way
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Start(NamedTuple):
    """What every worker process is started with."""

    who: str
    trainer: int  # its owner word
    threads: int
    seed: int


class Reported(BaseException):
    """The trainer has been told what failed; this process ends with exit code 1."""


def run(start: Start, body: Callable[..., object], packed: Any, control: Connection) -> None:
    """Call `body(control, *args)` in this process, and report to the trainer what it raises."""
    # Ctrl-C in a terminal reaches every process of the group. The trainer decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process().daemon = False  # a daemon may have no children, as a DataLoader's
    threading.Thread(target=_end_after, args=(start.trainer,), name="shmsync-watcher", daemon=True).start()
    _end_children_too(control)
    torch.set_num_threads(start.threads)
    seed_generators(start.seed)
    control.send((BEGAN, None))
    try:
        body(control, *(packed if isinstance(packed, tuple) else packed.load()))
    except Reported:
        raise SystemExit(1) from None
    except BaseException as error:
        report(control, error)
        raise SystemExit(1) from None


def report(control: Connection, error: BaseException) -> None:
    """Print an exception that was just caught to stderr, and send it to the trainer, unless that has died."""
    if dead_parent() is not None:
        return
    failure = Failure.of(error)
    with suppress(OSError, ValueError):  # stderr is closed
        print(f"{multiprocessing.current_process().name} (pid {os.getpid()}) failed:", file=sys.stderr)
        print(failure.trace, end="", file=sys.stderr, flush=True)
    with suppress(OSError):  # the trainer is gone
        control.send((FAILED, failure))


def _end_after(trainer: int) -> None:
    """Wait for the trainer's death, then end this process and its children, whatever they do."""
    peer = Peer(owner=trainer)
    while not peer.dead:
        time.sleep(_BETWEEN_LOOKS)
    time.sleep(_GRACE)
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """The children of a process, and theirs; a parent before its children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found + [each for child in found for each in _descendants(child)]


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


def seed_generators(seed: int) -> None:
    """Give each worker its own random numbers: those from one fork server would all draw the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def attach_and_work(control: Connection, handle: Handle, rank: int, work: Callable[..., object], *args: Any) -> None:
    """The body of a worker of Workers: the user's function, with a Subscriber."""
    sub = WorkerSubscriber(handle, rank, control)
    with sub:
        control.send((ATTACHED, None))
        try:
            work(sub, *args)
        except BaseException as error:
            returns = isinstance(error, SystemExit) and error.code in (None, 0)
            if returns or (isinstance(error, ClosedError) and sub.left):
                return
            report(control, error)  # before the Subscriber leaves: the trainer then knows why
            raise Reported from None


class WorkerSubscriber(Subscriber):
    """A Subscriber whose waits and versions() also end when the trainer leaves Workers."""

    def __init__(self, handle: Handle, worker: int, orders: Connection) -> None:
        self._orders = orders
        self._orders_lock = threading.Lock()
        self._left = False
        super().__init__(handle, worker=worker, timeout=float("inf"))  # the trainer's end or order ends each wait
        reader_of(self).look_also = self._check_left

    @property
    def left(self) -> bool:
        """Has the trainer left Workers?"""
        with self._orders_lock:
            if not self._left:
                with suppress(EOFError, OSError):  # a trainer that has died says nothing; waits find that it is dead
                    self._left = self._orders.poll(0) and bool(self._orders.recv_bytes())
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
