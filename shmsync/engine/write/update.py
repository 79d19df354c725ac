"""One update() section: the new version is written in place, and leaving publishes it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ... import _native
from ...errors import ForkedHandle
from ...memory.dynamo import disable
from ..deadlines import deadline_after
from .acks import Acks

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from .writer import Writer


class Update(_native.Scope):
    """What Publisher.update() returns: `with` calls _enter() and _exit(), and _recover() if they are interrupted.

    Not traced where an optimizer's step is compiled: only the step is.
    """

    def __init__(self, publisher: Any, writer: Writer, acks: Acks | None = None, timeout: float | None = None) -> None:
        super().__init__()
        self._publisher = publisher  # lives as long as its section
        self._writer = writer
        self._acks = acks
        self._timeout = timeout
        self._seconds = 0.0  # spent at the entry

    @disable
    def _enter(self) -> TensorDictBase:
        writer, started = self._writer, time.perf_counter()
        writer.check()
        writer.lock.acquire(self)
        if self._acks is not None:
            writer.refuse_wait(self._acks)
        weights = writer.begin_update(deadline_after(self._timeout, writer.timeout))
        self._seconds = time.perf_counter() - started
        return weights

    @disable
    def _exit(self, failed: bool) -> None:
        writer = self._writer
        if writer.in_parent:
            raise ForkedHandle("this update() was begun in the parent process; only the parent can finish it")
        if failed:
            self._recover()
            return
        started = time.perf_counter()
        version = writer.end_update()
        writer.counts.publish.add(self._seconds + time.perf_counter() - started)
        try:
            if self._acks is not None:
                # The timeout starts again: the time spent in the body does not count.
                writer.wait_acks(version, self._acks, deadline_after(self._timeout, writer.timeout))
        finally:
            writer.lock.release(self)  # published: there is nothing left to recover

    @disable
    def _recover(self) -> None:
        """Undo: publish nothing, and give the lock back. Safe at any moment, and twice."""
        writer = self._writer
        if writer.lock.held_by(self) and not writer.in_parent:
            writer.updating_thread = None
            writer.undo()
            writer.lock.release(self)
