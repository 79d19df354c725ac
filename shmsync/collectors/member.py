"""A collector's worker process as the trainer sees it: its pipes, orders and loss; and the end of all workers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ..errors import DataMismatch, WorkerDied
from ..schemes import WeightSyncScheme
from ..workers.process import Process, end
from . import buffers
from .collector_process import BATCH, COLLECT, STOP, run

_STOPPING = 5.0  # seconds, for environments to close


class Member(Process):
    """One worker process; besides its pipe for messages it has one for weights. `args`: of run(); `filled`: of all."""

    def __init__(
        self, context: Any, index: int, args: tuple[Any, ...], seed: int, filled: dict[tuple[int, int], None],
        orders: Iterable[int],
    ) -> None:  # fmt: skip
        self.index = index
        self.filled = filled  # gets (worker, buffer) of each batch, in the order of arrival
        self.joined = False  # it has its weights and knows its buffers
        self.delivered = False  # a batch since it was started
        self.orders = list(orders)  # the buffers that it has to fill
        self.layout: tuple[buffers.Leaves, int] | None = None  # of a frame, and the number of its environments
        self.weights, weights_there = context.Pipe()
        try:
            super().__init__(context, f"collector {index}", run, (weights_there, index, *args), seed=seed)
        finally:
            weights_there.close()

    def raise_loss(self) -> None:
        """Raise what it failed with, as an exception that may end a loop or a program, or WorkerDied."""
        if self.failure is None:
            raise WorkerDied(
                f"collector worker {self.index} died ({self.how}). Its unfinished frames are lost; "
                "restart_workers=True restarts such a worker",
                missing=[self.index],
            )
        error = self.failure.exception()
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            # StopIteration would end the trainer's loop as if all frames were there, as in PEP 479.
            error = RuntimeError(self.failure.summary)
        raise error from RuntimeError(f"collector worker {self.index} failed:\n{self.failure.trace}")

    def order(self, buffer: int) -> None:
        """Let it fill this buffer."""
        self.orders.append(buffer)
        self.send(COLLECT, buffer)

    def take(self, word: str, content: Any) -> None:
        """Its message: a batch is there, or what its frames look like."""
        if word == BATCH:
            self.delivered = True
            self.orders.remove(content)
            self.filled[self.index, content] = None
        else:
            self.layout = content

    def close(self) -> None:
        """As Process.close(); closes its pipe for weights too."""
        super().close()
        self.weights.close()


def agreed(layouts: list[Any]) -> tuple[buffers.Leaves, int]:
    """The layout and the number of environments that all workers have. Raises DataMismatch when they differ."""
    first, count = layouts[0]
    for index, (layout, environments) in enumerate(layouts):
        if (layout, environments) != (first, count):
            keys = sorted(".".join(key) for key in {key for key, _ in layout.items() ^ first.items()})
            what = (
                f"frames of different form ({', '.join(keys)})" if keys else f"{count} and {environments} environments"
            )
            raise DataMismatch(
                f"workers 0 and {index} have {what}; all workers need the same spaces, and the same number of "
                "environments, also inside of vector environments"
            )
    return first, count


def end_all(members: dict[int, Member], scheme: WeightSyncScheme) -> None:
    """End the workers, then what they used. Idempotent. A Ctrl-C meanwhile ends the workers at once."""
    try:
        end(members, STOP, time.monotonic() + _STOPPING)
    finally:
        members.clear()
        scheme.shutdown()
