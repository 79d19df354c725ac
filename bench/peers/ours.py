"""shmsync: publish() with one and with three slots, and update() of an adopted module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import shmsync
from peers import session
from peers.weights import build

PATIENCE = 60.0


class BoundReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, handle: shmsync.Handle, index: int, size: str, seen: int) -> None:
        super().__init__(pipe, hold)
        self.sub = shmsync.Subscriber(handle, worker=index, timeout=math.inf)
        self.weights = list(self.sub.bind(build(size), guard=False))  # the same Parameters in each version
        self.seen = seen

    def wait(self) -> None:
        self.sub.wait_version(self.seen + 1)

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        with self.sub.read() as section:
            self.seen = section.version
            yield self.weights


class Publish(session.Session):
    slots = 1

    def __init__(self, size: str, workers: int, folder: str | None) -> None:
        super().__init__(size, workers, folder)
        self.pub = shmsync.Publisher(self.module, slots=self.slots, timeout=PATIENCE)

    def start(self) -> None:
        arguments = [(self.pub.handle, index, self.size, self.pub.version) for index in range(self.count)]
        self.crew = session.Crew(BoundReader, arguments, self.folder)

    def send(self) -> None:
        self.pub.publish()

    def close(self) -> None:
        super().close()
        self.pub.close()


class PublishThreeSlots(Publish):
    slots = 3


class Update(Publish):
    """The trainer steps inside update(), in the arena itself. Leaving it publishes."""

    def __init__(self, size: str, workers: int, folder: str | None) -> None:
        super().__init__(size, workers, folder)
        self.pub.adopt(self.module)
        self.leaves = [parameter.data for parameter in self.module]

    def prepare(self, value: float) -> None:
        self.update = self.pub.update()
        self.update.__enter__()
        super().prepare(value)

    def send(self) -> None:
        self.update.__exit__(None, None, None)
