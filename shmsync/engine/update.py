"""One update() section: the new version is written in place, and leaving publishes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from tensordict import TensorDictBase

from .. import _native
from ..errors import ForkedHandle
from .timing import deadline_after
from .writing import Acks, WriteSide


class Update(_native.Scope):
    """What Publisher.update() returns: `with` calls _enter() and _exit(), and _recover() if they are interrupted."""

    def __init__(self, publisher: object, side: WriteSide, acks: Acks, timeout: float | None) -> None:
        super().__init__()
        self._publisher = publisher  # lives as long as its section
        self._side = side
        self._acks = acks
        self._timeout = timeout
        self._seconds = 0.0  # spent at the entry

    def _enter(self) -> TensorDictBase:
        side = self._side
        started = time.perf_counter()
        side.check()
        side.lock.acquire(self)
        side.check()  # close() may have come between
        side.refuse_poisoned()
        if self._acks.wanted:
            side.refuse_own_section(self._acks)
        side.begin(deadline_after(self._timeout, side.timeout))
        if side.arena.slots > 1:
            side.carry_all()
        elif side.adopted is not None:
            side.counts.bytes_copied += side.adopted.take_back()
        weights = side.arena.weights(side.writer.slot, writable=True)
        side.updating_thread = threading.get_ident()
        self._seconds = time.perf_counter() - started
        return weights

    def _exit(self, failed: bool) -> None:
        side = self._side
        if side.in_parent:
            raise ForkedHandle("this update() was begun in the parent process; only the parent can finish it")
        if failed:
            self._recover()
            return
        started = time.perf_counter()
        if side.adopted is not None:
            side.counts.bytes_copied += side.adopted.copy_buffers()
        version = side.writer.commit()
        side.updating_thread = None
        side.counts.updates += 1
        side.counts.publish.add(self._seconds + time.perf_counter() - started)
        try:
            if self._acks.wanted:
                # The timeout starts anew: the time spent in the body does not count.
                side.wait_acks(version, self._acks, deadline_after(self._timeout, side.timeout))
        finally:
            side.lock.release(self)  # published: there is nothing left to recover

    def _recover(self) -> None:
        """Undo: publish nothing, and give the lock back. Safe at any moment, and twice."""
        side = self._side
        if side.lock.held_by(self) and not side.in_parent:
            side.updating_thread = None
            side.undo()
            side.lock.release(self)


def step_inside_update(
    optimizer: torch.optim.Optimizer, side: WriteSide, update: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Let optimizer.step() open an update() section from now on, unless its thread is in one already."""
    step = optimizer.step

    def step_in_update(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if side.closed or side.updating_thread == threading.get_ident():
            return step(*args, **kwargs)
        with update():
            return step(*args, **kwargs)

    if hasattr(step, "_wrapped_by_lr_sched"):  # schedulers made later look for this attribute
        step_in_update._wrapped_by_lr_sched = step._wrapped_by_lr_sched  # type: ignore[attr-defined]
    optimizer.step = MethodType(step_in_update, optimizer)  # type: ignore[method-assign]  # schedulers wrap a method
