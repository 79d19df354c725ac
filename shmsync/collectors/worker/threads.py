"""Environments that wait, each in a thread of its own, so that those of a worker wait at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue  # noqa: TID251  # no wait of this one has a timeout
from typing import Any

import torch

from .observation_buffers import Observations
from .singles import Leading, Results, SingleEnvs

Work = Callable[[], None]


class EnvInThread:
    """An environment that is made, reset, stepped and closed in one thread, whichever thread asks for it.

    What it has besides (its spaces, its random generator) is read from here.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="shmsync-environment", daemon=True)
        self.thread.start()
        try:
            self._env = self._answer(make)
        except BaseException:
            self._work.put(None)
            raise

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # making it has failed
            raise AttributeError(name)
        return getattr(self._env, name)

    def put(self, work: Work) -> None:
        """Do this in the environment's thread, after what was put before. It must not raise."""
        self._work.put(work)

    def close(self) -> None:
        """Close the environment, and end the thread."""
        try:
            self._answer(self._env.close)
        finally:
            self._work.put(None)

    def _answer(self, function: Callable[[], Any]) -> Any:
        found: list[Any] = []
        with_all = AtOnce([self])
        with_all.begin(lambda _: found.append(function()))
        with_all.finish()
        return found[0]

    def _run(self) -> None:
        torch.set_num_threads(1)  # which OpenMP counts for each thread
        while (work := self._work.get()) is not None:
            work()


class AtOnce:
    """Work that is done in the threads of several environments at the same time."""

    def __init__(self, envs: Sequence[EnvInThread]) -> None:
        self._envs = envs
        self._counting = threading.Lock()
        self._ended = threading.Lock()  # taken while work is under way
        self._left = 0

    def begin(self, work: Callable[[int], None]) -> None:
        """Call work(i) in the thread of each environment i."""
        self._ended.acquire()
        self._left, self._failures = len(self._envs), {}
        for i, env in enumerate(self._envs):
            env.put(partial(self._do, work, i))

    def wait(self) -> None:
        """Until all of it has ended, one way or another."""
        with self._ended:
            pass

    def finish(self) -> None:
        """Wait, and raise what the first of them has raised."""
        self.wait()
        if self._failures:
            raise self._failures[min(self._failures)]

    def _do(self, work: Callable[[int], None], i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            self._failures[i] = error
        with self._counting:
            self._left -= 1
            last = self._left == 0
        if last:
            self._ended.release()

    _failures: dict[int, BaseException]


class ThreadedEnvs(SingleEnvs):
    """Environments that are stepped at the same time, in their threads."""

    def __init__(self, envs: Sequence[EnvInThread], observations: Observations) -> None:
        super().__init__(envs, observations)
        self._at_once = AtOnce(envs)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        now = self._observations.now
        self._at_once.begin(lambda i: self.reset_one(i, None if seed is None else seed + i, now))
        self._at_once.finish()
        self._returns = [0.0] * self.count

    def begin(self, actions: Any, to: Results, t: int, following: Leading) -> None:
        """Let all of them step, while this thread goes on."""
        self._at_once.begin(lambda i: self.step_one(i, actions, to, t, following))

    def finish(self) -> None:
        """Wait until all of them have stepped."""
        self._at_once.finish()

    def abandon(self) -> None:
        """Wait for what has begun; how it ends is nothing to anybody."""
        self._at_once.wait()
