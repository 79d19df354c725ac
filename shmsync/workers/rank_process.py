"""A worker of Workers: its Subscriber, whose waits end when the trainer leaves, and what it reports."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ..engine.outcome import Failure
from ..engine.subscriber import Subscriber, reader_of
from ..errors import ClosedError
from ..memory.control.segment import Handle

LEAVE, FAILED = "leave", "failed"  # the trainer's word, and the worker's


class WorkerStart(NamedTuple):
    """What a worker is started with; the arguments of the user's function are apart, since queues cannot be copied."""

    handle: Handle
    rank: int
    threads: int
    seed: int


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


def run(spec: WorkerStart, work: Callable[..., object], args: tuple[Any, ...], control: Connection) -> None:
    """Run the user's function in this process, and report to the trainer what it raises."""
    # Ctrl-C in a terminal reaches every process of the group. The trainer decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process().daemon = False  # a daemon may have no children, as a DataLoader's
    torch.set_num_threads(spec.threads)
    seed_generators(spec.seed)
    try:
        sub = WorkerSubscriber(spec.handle, spec.rank, control)
        with sub:
            try:
                work(sub, *args)
            except BaseException as error:
                returns = isinstance(error, SystemExit) and error.code in (None, 0)
                if returns or (isinstance(error, ClosedError) and sub.left):
                    return
                report(control, FAILED, error)  # before the Subscriber leaves: the trainer then knows why
                raise SystemExit(1) from None
    except SystemExit:
        raise
    except BaseException as error:  # attaching or leaving failed
        report(control, FAILED, error)
        raise SystemExit(1) from None


def report(control: Connection, word: str, error: BaseException) -> None:
    """Send the trainer an exception that was just caught, as a message of this word."""
    with suppress(OSError):  # the trainer is gone
        control.send((word, Failure.of(error)))


def seed_generators(seed: int) -> None:
    """Give each worker its own random numbers: those from one fork server would all draw the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
