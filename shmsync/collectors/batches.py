"""Which batch comes next: with sync one from all workers, else one from whichever is ready; none that is too old."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

from .buffers import BUFFERS
from .options import CollectorOptions
from .pool import WorkerPool


class Batches:
    """The batches of one collector. A next() that a Ctrl-C has ended is continued by the one after it."""

    def __init__(self, pool: WorkerPool, options: CollectorOptions) -> None:
        self._pool = pool
        self._options = options
        self.dropped = 0
        self._buffer = 0  # of the next batch, in sync mode
        self._handed: tuple[int, int] | None = None  # (worker, buffer) that the trainer has, without sync

    def begin(self) -> None:
        """Without sync, let all workers fill all buffers."""
        for member in () if self._options.sync else self._pool.members.values():
            for buffer in range(BUFFERS):
                member.order(buffer)

    def next(self) -> TensorDict:
        """Wait for a batch. Raises AckTimeout, WorkerDied or what a worker failed with."""
        return self._next_sync() if self._options.sync else self._next_async()

    def begin_round(self) -> None:
        """Order the next batch from all workers that have neither this order yet nor filled it."""
        for index, member in self._pool.members.items():
            if self._buffer not in member.orders and (index, self._buffer) not in self._pool.filled:
                member.order(self._buffer)

    def _next_sync(self) -> TensorDict:
        while True:
            self.begin_round()
            self._await(lambda: len(self._pool.filled) == len(self._pool.members))
            self._pool.filled.clear()
            batch = self._pool.memory.batch(self._buffer)
            if not self._too_old(batch):
                self._buffer = (self._buffer + 1) % BUFFERS
                return batch

    def _next_async(self) -> TensorDict:
        while True:
            if self._handed is not None:  # the trainer is done with it, or it was too old
                index, buffer = self._handed
                self._handed = None
                self._pool.members[index].order(buffer)
            self._await(lambda: self._pool.filled)
            index, buffer = self._handed = next(iter(self._pool.filled))
            del self._pool.filled[index, buffer]
            batch = self._pool.memory.batch(buffer, self._pool.rows(index))
            if not self._too_old(batch):
                return batch

    def _await(self, done: Callable[[], Any]) -> None:
        """Wait until done(). Workers that are lost meanwhile are started again, or raise."""
        deadline = time.monotonic() + self._options.timeout
        while (lost := self._pool.wait(done, deadline, list(self._pool.members))) is not None:
            if not (self._options.restart_workers and lost.delivered):
                lost.raise_loss()
            self._pool.restart(lost.index)

    def _too_old(self, batch: TensorDict) -> bool:
        """Must the batch be collected again? Counts it as dropped then, or only warns."""
        lag = self._pool.sender.version - int(batch["policy_version"].min())
        if lag <= self._options.max_lag:
            return False
        if self._options.on_lag == "warn":
            warnings.warn(
                f"frames are {lag} versions old when they are handed out, max_lag is {self._options.max_lag}; send "
                'weights less often, or use on_lag="drop"',
                stacklevel=5,
            )
            return False
        self.dropped += 1
        return True
