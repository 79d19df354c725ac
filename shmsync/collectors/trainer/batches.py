"""Which batch comes next: with sync one from all workers, else one from whichever is ready; none that is too old."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDict

from ..buffers import BUFFERS
from ..options import CollectorOptions
from .jobs import Jobs
from .start_and_restart import WorkerSetup
from .worker_pool import WorkerPool


class Batches:
    """The batches of one collector. An interrupted next() is gone on with by the one after it."""

    def __init__(self, pool: WorkerPool, jobs: Jobs, setup: WorkerSetup, options: CollectorOptions) -> None:
        self._pool = pool
        self._jobs = jobs
        self._setup = setup
        self._options = options
        self.dropped = 0
        # In sync mode: the buffer of the next batch, and the serial that its jobs must be newer than. One attribute,
        # so that an interrupt finds the batch handed out, or not.
        self._round = (0, 0)
        self._handed: tuple[int, int] | None = None  # (worker, buffer) that the trainer has, without sync

    def begin(self) -> None:
        """Without sync, start all jobs at once."""
        for index in () if self._options.sync else self._jobs.open:
            for buffer in range(BUFFERS):
                self._start_job(index, buffer)

    def begin_again(self) -> None:
        """With sync, earlier jobs are those of another life."""
        self._round = (self._round[0], self._jobs.serial)

    def next(self) -> TensorDict:
        """Wait for a batch. Raises AckTimeout, WorkerDied or what a worker failed with."""
        return self._next_sync() if self._options.sync else self._next_async()

    def begin_round(self) -> int:
        """Order the next batch from all workers, if an interrupted next() has not done so already."""
        buffer, after = self._round
        for index, jobs in self._jobs.open.items():
            if buffer not in jobs or jobs[buffer].serial <= after:
                self._start_job(index, buffer)
        return buffer

    def _next_sync(self) -> TensorDict:
        while True:
            buffer = self.begin_round()
            self._await(partial(self._jobs.filled, buffer), list(self._jobs.open))
            batch = self._setup.memory.batch(buffer)
            if self._too_old(batch):
                self._round = (buffer, self._jobs.serial)
                continue
            self._round = ((buffer + 1) % BUFFERS, self._jobs.serial)
            return batch

    def _next_async(self) -> TensorDict:
        if self._handed is not None:
            self._start_job(*self._handed)  # the trainer is done with it
            self._handed = None
        while True:
            behind = self._furthest_behind()
            workers = list(self._jobs.open) if behind is None else [behind]
            self._await(partial(self._first_of, workers), workers)
            chosen = self._first_of(workers)
            if chosen is None:  # the worker that had it was started again
                continue
            index, buffer = chosen
            batch = self._setup.memory.batch(buffer, self._setup.rows(index))
            if self._too_old(batch):
                self._start_job(index, buffer)
                continue
            self._handed = chosen
            return batch

    def _first_of(self, workers: list[int]) -> tuple[int, int] | None:
        return next((chosen for chosen in self._jobs.ready() if chosen[0] in workers), None)

    def _start_job(self, index: int, buffer: int) -> None:
        self._jobs.give(index, buffer, self._setup.sender.version)

    def _await(self, done: Callable[[], Any], workers: list[int]) -> None:
        """Wait until done(). Workers that are lost meanwhile are started again, or raise."""
        deadline = time.monotonic() + self._options.timeout
        while (lost := self._pool.wait(done, deadline, workers)) is not None:
            if not (self._options.restart_workers and lost.delivered):
                lost.raise_loss()
            self._setup.restart(lost.index)

    def _too_old(self, batch: TensorDict) -> bool:
        """Must the batch be collected again? Counts it as dropped then, or only warns."""
        lag = self._setup.sender.version - int(batch["policy_version"].min())
        if lag <= self._options.max_lag:
            return False
        if self._options.on_lag == "warn":
            warnings.warn(
                f"frames are {lag} versions old when they are handed out, max_lag is {self._options.max_lag}; send "
                'weights less often, or use on_lag="wait" or "drop"',
                stacklevel=5,
            )
            return False
        self.dropped += 1
        return True

    def _furthest_behind(self) -> int | None:
        """The worker to wait for, whose frames would be too old with the next version; None: any worker."""
        if self._options.on_lag != "wait":
            return None
        newest = self._setup.sender.version
        oldest = {
            index: min([job.version for job in jobs.values() if not job.arrived], default=newest)
            for index, jobs in self._jobs.open.items()
        }
        for index, buffer in self._jobs.ready():
            version = int(self._setup.memory.tensors[buffer][("policy_version",)][self._setup.rows(index)].min())
            oldest[index] = min(oldest[index], version)
        index = min(oldest, key=oldest.__getitem__)
        return index if newest - oldest[index] >= self._options.max_lag else None
