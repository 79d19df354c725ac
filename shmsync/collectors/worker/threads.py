"""Environments that wait, each in a separate thread, so that those of a worker wait at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...schemes.link.serial_executor import SerialExecutor, Task
from .singles import Leading, Results, SingleEnvs


class EnvInThread:
    """An environment that is made, reset, stepped and closed in one thread, whichever thread asks for it.

    What it has besides (its spaces, its random generator) is read from here.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        # No concurrent.futures: at its end a process that the environment forks would wait for the thread that it is.
        self._executor = SerialExecutor()
        self.submit(partial(torch.set_num_threads, 1))  # which OpenMP counts for each thread
        self._env = self.submit(make).result()

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # making it has failed
            raise AttributeError(name)
        return getattr(self._env, name)

    def submit(self, work: Callable[[], Any]) -> Task:
        """Call this in the environment's thread, after what was submitted before."""
        return self._executor.give(work)

    def close(self) -> None:
        """Close the environment, and end the thread."""
        try:
            self.submit(self._env.close).result()
        finally:
            self._executor.close()


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
