"""What most people write first: module.share_memory(), with a lock and a copy in each worker, or with neither.

Every copy is one call for all tensors, which is the fastest that torch has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from peers import session


class LockedReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, shared: list[torch.Tensor], lock: Any) -> None:
        super().__init__(pipe, hold)
        self.shared, self.lock = shared, lock
        self.own = [torch.empty_like(leaf) for leaf in shared]

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        with self.lock:
            torch._foreach_copy_(self.own, self.shared)
            self.hold()
        yield self.own


class Locked(session.Session):
    def start(self) -> None:
        self.lock = session.CONTEXT.Lock()
        self.shared = [leaf.clone().share_memory_() for leaf in self.leaves]
        self.crew = session.Crew(LockedReader, [(self.shared, self.lock)] * self.count, self.folder)

    def send(self) -> None:
        with self.lock:
            torch._foreach_copy_(self.shared, self.leaves)
        self.crew.wake()


class UnlockedReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, shared: list[torch.Tensor]) -> None:
        super().__init__(pipe, hold)
        self.shared = shared

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        yield self.shared


class Unlocked(session.Session):
    """The trainer's own module is the shared one. Only the contest's wait for all answers prevents torn reads."""

    def start(self) -> None:
        self.module.share_memory()
        self.leaves = [parameter.data for parameter in self.module]
        self.crew = session.Crew(UnlockedReader, [(self.leaves,)] * self.count, self.folder)

    def send(self) -> None:
        self.crew.wake()
