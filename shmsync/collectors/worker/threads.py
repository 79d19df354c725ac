"""Environments that wait, each in a separate thread, so that those of a worker wait at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue  # noqa: TID251  # no wait of this one has a timeout
from typing import Any

import torch

from .singles import Leading, Results, SingleEnvs

Work = tuple["Future[Any]", Callable[[], Any]]


class EnvInThread:
    """An environment that is made, reset, stepped and closed in one thread, whichever thread asks for it.

    What it has besides (its spaces, its random generator) is read from here.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        # No executor's thread: at its end a process that the environment forks would wait for the thread that it is.
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._work,), name="shmsync-environment", daemon=True).start()
        try:
            self._env = self.submit(make).result()
        except BaseException:
            self._work.put(None)
            raise

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # making it has failed
            raise AttributeError(name)
        return getattr(self._env, name)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Call this in the environment's thread, after what was submitted before."""
        future: Future[Any] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Close the environment, and end the thread."""
        try:
            self.submit(self._env.close).result()
        finally:
            self._work.put(None)


def _serve(queue: SimpleQueue[Work | None]) -> None:
    torch.set_num_threads(1)  # which OpenMP counts for each thread
    while (item := queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del item, future, work  # while it waits, nothing lives on for it


class ThreadedEnvs(SingleEnvs):
    """Environments that are stepped at the same time, in their threads."""

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        now = self._observations.now
        self._submit(lambda i: self.reset_one(i, None if seed is None else seed + i, now))
        self.finish()
        self._returns = [0.0] * self.count

    def begin(self, actions: Any, to: Results, t: int, following: Leading) -> None:
        """Let all of them step, while this thread goes on."""
        self._submit(lambda i: self.step_one(i, actions, to, t, following))

    def finish(self) -> None:
        """Wait until all of them have stepped. Raises what the first of them has raised."""
        failures = [error for each in self._running if (error := each.exception()) is not None]
        if failures:
            raise failures[0]

    def _submit(self, work: Callable[[int], None]) -> None:
        self._running = [env.submit(partial(work, i)) for i, env in enumerate(self._envs)]
