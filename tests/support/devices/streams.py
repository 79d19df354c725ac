"""The streams of the device that has no hardware (simulated.py): threads that do later what they were asked for."""

from __future__ import annotations

import ctypes
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulated import Simulated


_DEPTH = 32  # what a stream has to do at most; a thread that asks for more waits, as with real drivers
_HOLDING_THE_GIL = ctypes.PyDLL(None)


class Event:
    """What a stream had to do when it was recorded."""

    def __init__(self) -> None:
        self.done = threading.Event()


class Stream:
    """A thread that does what it is given, in order. It ends when no object refers to the stream any more."""

    def __init__(self, device: Simulated, seed: int) -> None:
        self._line: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._given, self._done = 0, [0]  # pieces of work; its thread counts what is done, and does not hold the stream
        weakref.finalize(self, self._line.put, None).atexit = False
        arguments = self._line, device, random.Random(seed), self._done
        threading.Thread(target=_serve, args=arguments, name="simulated stream", daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        while self._line.qsize() >= _DEPTH:  # no semaphore: an interrupt would lose its room
            time.sleep(0.00005)
        self._given += 1
        self._line.put(work)

    @property
    def idle(self) -> bool:
        """Has it done all its work?"""
        return self._given == self._done[0]

    def record(self) -> Event:
        event = Event()
        self.give(event.done.set)
        return event


def _serve(line: queue.SimpleQueue, device: Simulated, chance: random.Random, done: list[int]) -> None:
    while (work := line.get()) is not None:
        device.delay(chance)
        if device.failed is None or getattr(work, "__name__", "") == "set":  # threads that wait for an event must wake
            try:
                work()
            except Exception as error:  # as a kernel that faults
                device.failed = error
        done[0] += 1


class _Host:
    """The calling thread as a stream: all its work is done."""


HOST = _Host()


def on_a_drivers_thread(function: int, ticket: int) -> None:
    """As a driver calls: on a thread that Python does not know. The GIL is held meanwhile: asking for it hangs."""
    thread = ctypes.c_ulong()
    error = _HOLDING_THE_GIL.pthread_create(
        ctypes.byref(thread), None, ctypes.c_void_p(function), ctypes.c_void_p(ticket)
    )
    if error:
        raise OSError(error, os.strerror(error))
    _HOLDING_THE_GIL.pthread_join(thread, None)
