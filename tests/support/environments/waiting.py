"""Environments that wait for one another, or for nothing, and know which thread they are in."""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
import struct
import threading
import time
from typing import ClassVar

from gymnasium.vector import AsyncVectorEnv

from support.environments.basic import Counting

WATCHDOG = 60  # seconds


class Together(Counting):
    """A step ends when `count` environments of the process are in theirs: one after the other, the first never ends."""

    barriers: ClassVar[dict[int, threading.Barrier]] = {}

    def __init__(self, count, length=7):
        super().__init__(length)
        self._barrier = self.barriers.setdefault(count, threading.Barrier(count))

    def step(self, action):
        self._barrier.wait(WATCHDOG)
        return super().step(action)


class OwnThread(Counting):
    """Raises where it is called in another thread than the one that has made it, or in one that made another."""

    makers: ClassVar[set[int]] = set()

    def __init__(self, length=5):
        super().__init__(length)
        self._thread = threading.get_ident()
        assert self._thread not in self.makers and threading.current_thread() is not threading.main_thread()
        self.makers.add(self._thread)

    def check(self):
        assert threading.get_ident() == self._thread

    def reset(self, **kwargs):
        self.check()
        return super().reset(**kwargs)

    def step(self, action):
        self.check()
        return super().step(action)

    def close(self):
        self.check()


class Forking(Counting):
    """A simulator in a separate process, which it forks at each reset from the thread that it lives in."""

    def reset(self, **kwargs):
        pipe, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=theirs.send, args=("ready",))
        child.start()
        child.join()
        assert (pipe.recv(), child.exitcode) == ("ready", 0)
        return super().reset(**kwargs)


class Breaking(Counting):
    """Its n-th to be made raises in this call; all the others wait in a step until it has."""

    made = 0
    broken = threading.Event()

    def __init__(self, call, which=1, error=ArithmeticError):
        super().__init__()
        self.call, self.mine, self.error = call, Breaking.made == which, error
        Breaking.made += 1
        self.break_in("make")

    def break_in(self, call):
        if self.call != call:
            return
        if self.mine:
            self.broken.set()
            raise self.error("the simulator broke")
        if call == "step":
            assert self.broken.wait(WATCHDOG)

    def reset(self, **kwargs):
        self.break_in("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.break_in("step")
        return super().step(action)

    def close(self):
        self.break_in("close")


class Partner(Counting):
    """One of two, in processes of their own: a step ends when the other one has begun as many."""

    def __init__(self, path, index, length=7):
        super().__init__(length)
        self._path, self._index, self._begun = path, index, 0

    def step(self, action):
        self._begun += 1
        fd = os.open(self._path, os.O_RDWR)
        try:
            with mmap.mmap(fd, 16) as counts:
                struct.pack_into("q", counts, 8 * self._index, self._begun)
                end = time.monotonic() + WATCHDOG
                while struct.unpack_from("q", counts, 8 * (1 - self._index))[0] < self._begun:
                    assert time.monotonic() < end, "the other one has not begun"
                    time.sleep(0.001)
        finally:
            os.close(fd)
        return super().step(action)


class Partners:
    """Makes AsyncVectorEnvs of one environment; the two of a worker wait for each other in each step."""

    def __init__(self, path):
        self.path, self.made = str(path), 0

    def __call__(self):
        self.made += 1
        return AsyncVectorEnv([functools.partial(Partner, self.path, self.made - 1)])
