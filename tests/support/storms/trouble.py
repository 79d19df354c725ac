"""What befalls the workers of a storm, when it did, and who can be blamed for what."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass, field

from support import processes
from support.storms.board import COMPUTING, EXIT, RECEIVING, STOP
from support.worker import Gone

DEADLY = ("kill", "kill in forward", "kill in receive", "exit")
KINDS = (*DEADLY, "stop", "stop and go on", "stop and go on")


@dataclass
class Life:
    """One worker process: its row of the board, and what was done to it. Times are in ns of the monotonic clock."""

    index: int  # of the worker
    worker: object  # that drives it
    row: object
    number: int  # of the row
    touched: list = field(default_factory=list)  # (from, to) of every trouble; `to` is inf for a death
    dead_since: float = math.inf  # it was dead then, for sure
    stopped_since: float = math.inf  # it stood still then, for sure
    left: bool = False  # it exited; if it used a version before, that version has reached it
    reported: bool = False  # the sender has said that it is dead, and leaves it out
    least: int = 0  # the number that its forwards have at least, since an answered send
    sent: set = field(default_factory=set)  # numbers that were sent to it

    def untouched(self, start, end):
        return all(to < start or since > end for since, to in self.touched)

    @property
    def doomed(self):
        return any(to == math.inf for _, to in self.touched) and self.stopped_since == math.inf

    @property
    def whole(self):
        return not any(to == math.inf for _, to in self.touched)


class Hand:
    """A thread that does it, by act(kind, life), while the trainer calls."""

    def __init__(self, act=None):
        self._act = act or globals()["act"]
        self._orders = queue.SimpleQueue()
        self._done = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="the hand of the storm", daemon=True)
        self._thread.start()

    def order(self, kind, life, delay):
        self._orders.put((kind, life, delay))

    def await_all(self, count):
        """Until the last so many orders were carried out."""
        for _ in range(count):
            if (error := self._done.get(timeout=120)) is not None:
                raise error

    def close(self):
        self._orders.put(None)
        self._thread.join()

    def _run(self):
        while (order := self._orders.get()) is not None:
            try:
                kind, life, delay = order
                time.sleep(delay)
                self._act(kind, life)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)


def act(kind, life):
    """Do it now."""
    pid = life.row.get("pid")
    if kind in ("kill in forward", "kill in receive"):
        phase, until = COMPUTING if kind == "kill in forward" else RECEIVING, time.monotonic() + 0.05
        while life.row.get("phase") != phase and time.monotonic() < until:
            pass
    now = time.monotonic_ns()
    if kind in ("stop", "stop and go on"):
        life.touched.append((now, math.inf))
        processes.stop(pid)
        life.stopped_since = time.monotonic_ns()
        if kind == "stop and go on":
            time.sleep(0.03)
            resume(life)
        return
    life.touched.append((now, math.inf))
    if kind.startswith("kill"):
        os.kill(pid, signal.SIGKILL)
        processes.until(lambda: not processes.alive(pid))
    else:
        life.left = True
        life.row.set("command", EXIT)
        processes.until(lambda: not processes.alive(pid) or life.worker.done())
        if processes.alive(pid):
            with contextlib.suppress(Gone):
                life.worker.result()  # raises what it failed with
            processes.until(lambda: not processes.alive(pid))
    life.dead_since = time.monotonic_ns()


def finish(lives):
    """Let the stopped go on, and all of them end; raises what one of them failed with."""
    for life in lives:
        if life.stopped_since != math.inf:
            resume(life)
        life.row.set("command", STOP)
    for life in lives:
        if life.whole:
            life.worker.result()


def resume(life):
    """Let one that was stopped go on."""
    life.stopped_since = math.inf
    processes.resume(life.row.get("pid"))
    now = time.monotonic_ns()
    life.touched = [(since, now if to == math.inf else to) for since, to in life.touched]
