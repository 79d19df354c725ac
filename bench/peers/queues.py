"""A queue of torch.multiprocessing to each worker, which keeps what it got. Every version is a new message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import multiprocessing as torch_multiprocessing

from peers import session


class QueueReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, queue: Any) -> None:
        super().__init__(pipe, hold)
        self.queue = queue

    def wait(self) -> None:
        found = self.queue.get()
        self.weights = [torch.from_numpy(each) if not isinstance(each, torch.Tensor) else each for each in found]

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        yield self.weights


class Tensors(session.Session):
    """As tensors: torch moves each into shared memory, and sends its descriptor."""

    def start(self) -> None:
        context = torch_multiprocessing.get_context("forkserver")
        self.queues = [context.Queue() for _ in range(self.count)]
        self.crew = session.Crew(QueueReader, [(queue,) for queue in self.queues], self.folder)

    def message(self) -> list[Any]:
        return [leaf.clone() for leaf in self.leaves]  # a sent tensor must not be written again

    def send(self) -> None:
        message = self.message()
        for queue in self.queues:
            queue.put(message)

    def close(self) -> None:
        super().close()
        for queue in self.queues:
            queue.cancel_join_thread()  # it has no reader any more


class Arrays(Tensors):
    """As NumPy arrays: the bytes go through each pipe."""

    def message(self) -> list[Any]:
        return [leaf.numpy() for leaf in self.leaves]
