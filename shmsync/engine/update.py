"""One update() section: the new version is written in place, and leaving publishes it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from .. import _native
from ..errors import ForkedHandle
from .timing import deadline_after
from .writing import Wanted

if TYPE_CHECKING:
    from .publisher import Publisher


class Update(_native.Scope):
    """What Publisher.update() returns: `with` calls _enter() and _exit(), and _recover() if they are interrupted."""

    def __init__(self, publisher: Publisher, waits: bool, wanted: Wanted, timeout: float | None) -> None:
        super().__init__()
        self._publisher = publisher
        self._side = publisher._side
        self._waits = waits
        self._wanted = wanted
        self._timeout = timeout
        self._seconds = 0.0  # spent at the entry

    def _enter(self) -> TensorDictBase:
        pub, side = self._publisher, self._side
        started = time.perf_counter()
        pub._check()
        side.lock.acquire(self)
        pub._check()  # close() may have come between
        side.refuse_poisoned()
        if self._waits:
            side.refuse_own_section(self._wanted)
        side.begin(deadline_after(self._timeout, pub._timeout))
        if side.arena.slots > 1:
            side.carry_all()
        elif pub._adopted is not None:
            side.counts.bytes_copied += pub._adopted.take_back()
        weights = side.arena.weights(side.writer.slot, writable=True)
        side.updating_thread = threading.get_ident()
        self._seconds = time.perf_counter() - started
        return weights

    def _exit(self, failed: bool) -> None:
        pub, side = self._publisher, self._side
        if pub._generation != _native.fork_generation():
            raise ForkedHandle("this update() was begun in the parent process; only the parent can finish it")
        if failed:
            self._recover()
            return
        started = time.perf_counter()
        if pub._adopted is not None:
            side.counts.bytes_copied += pub._adopted.copy_buffers()
        version = side.writer.commit()
        side.updating_thread = None
        side.counts.updates += 1
        side.counts.publish.add(self._seconds + time.perf_counter() - started)
        try:
            if self._waits:
                # The body took its own time; the workers get all of theirs.
                side.wait_acks(version, self._wanted, deadline_after(self._timeout, pub._timeout))
        finally:
            side.lock.release(self)  # published: there is nothing left to recover

    def _recover(self) -> None:
        """Nothing is published; the lock is given back. Safe at any moment, and twice."""
        side = self._side
        if side.lock.held_by(self) and self._publisher._generation == _native.fork_generation():
            side.updating_thread = None
            side.undo()
            side.lock.release(self)
