"""One update() section: the new version is written in place, and leaving publishes it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ... import _native
from ...errors import ForkedHandle
from ...memory.dynamo import disable
from ..adopt.optimizer_hooks import Section, StepGate
from ..deadlines import deadline_after
from .acks import Acks
from .publishing import begin
from .writing import WriteSide

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class Update(_native.Scope):
    """What Publisher.update() returns: `with` calls _enter() and _exit(), and _recover() if they are interrupted.

    `optimizer`: whose step it is for. `writes_at_once`: may its body write as soon as it begins? A load does not.
    """

    def __init__(
        self,
        publisher: object,
        side: WriteSide,
        acks: Acks | None = None,
        timeout: float | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        writes_at_once: bool = True,
    ) -> None:
        super().__init__()
        self._publisher = publisher  # lives as long as its section
        self._side = side
        self._acks = acks
        self._timeout = timeout
        self._seconds = 0.0  # spent at the entry
        self._optimizer, self._writes_at_once = optimizer, writes_at_once

    def _enter(self) -> TensorDictBase:
        side = self._side
        started = time.perf_counter()
        side.check()
        side.lock.acquire(self)
        side.ready(deadline_after(self._timeout, side.timeout))
        side.refuse_poisoned()
        if self._acks is not None:
            side.refuse_wait(self._acks)
        if side.adopted is not None:
            side.adopted.warn_of_stray_writes()
            side.adopted.look(self._optimizer)
        if side.arena.slots == 1:
            side.arena.weights(0, writable=True)  # the first time it imports tensordict: before the gate closes
        if not side.begin_at_once():
            begin(side, deadline_after(self._timeout, side.timeout))
        if side.arena.slots > 1:
            side.carry(None)
        elif side.adopted is not None:
            side.pull()
        side.writes.open_to()
        weights = side.arena.weights(side.writer.slot, writable=True)
        if side.arena.slots == 1:
            side.touched |= self._writes_at_once
        side.set_updating(threading.get_ident())
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
        side.touched = True
        if side.adopted is not None:
            side.adopted.look()  # the body may have replaced tensors too
            side.pull()
            side.counts.bytes_copied += side.adopted.buffers.copy()
            side.adopted.written()
        version = side.commit()
        side.set_updating(None)
        side.counts.updates += 1
        side.counts.publish.add(self._seconds + time.perf_counter() - started)
        try:
            if self._acks is not None:
                # The timeout starts again: the time spent in the body does not count.
                side.wait_acks(version, self._acks, deadline_after(self._timeout, side.timeout))
        finally:
            side.lock.release(self)  # published: there is nothing left to recover

    def _recover(self) -> None:
        """Undo: publish nothing, and give the lock back. Safe at any moment, and twice."""
        side = self._side
        if side.lock.held_by(self) and not side.in_parent:
            side.set_updating(None)
            side.undo()
            side.lock.release(self)


class StepUpdate(Update):
    """The section that an optimizer's step opens. Not traced when the step is compiled: only the step is."""

    _enter = disable(Update._enter)
    _exit = disable(Update._exit)
    _recover = disable(Update._recover)


def load_inside_update(publisher: object, side: WriteSide) -> None:
    """Let load_state_dict() of the adopted module, and of all in it, run in an update(), or join that of its thread."""
    adopted = side.adopted
    assert adopted is not None
    reference = weakref.ref(publisher)  # the module does not keep its publisher
    loading: set[int] = set()  # threads that are in load(): a submodule's own call is part of it

    def inside() -> bool:
        return side.closed or side.adopted is not adopted or side.updating_thread == threading.get_ident()

    def written() -> None:
        side.touched = True

    def load(run: Callable[[], Any]) -> Any:
        thread, owner = threading.get_ident(), reference()
        if side.closed or side.adopted is not adopted or owner is None or thread in loading:
            return run()
        loading.add(thread)
        try:
            if inside():
                return adopted.load(run, written)
            with Update(owner, side, writes_at_once=False):  # load() writes when it has succeeded
                return adopted.load(run, written)
        finally:
            loading.discard(thread)

    adopted.load_through(inside, load)


def step_inside_update(optimizers: Iterable[torch.optim.Optimizer], publisher: object, side: WriteSide) -> None:
    """Let the step() of each run in an update() section of the adopting publisher, unless its thread is in one."""
    adopted = side.adopted
    assert adopted is not None

    @torch.compiler.disable
    def joined(optimizer: torch.optim.Optimizer) -> bool:
        if side.closed:
            return True
        if side.updating_thread != threading.get_ident():
            return False
        adopted.look(optimizer)
        return True

    @torch.compiler.disable
    def update(optimizer: torch.optim.Optimizer) -> Update:
        return StepUpdate(publisher, side, optimizer=optimizer)

    def under_way() -> bool:
        return side.closed or side.updating_thread is not None

    gates = [StepGate.of(optimizer) for optimizer in optimizers]
    adopted.step_through(gates)
    for gate in gates:
        gate.join(Section(adopted, under_way, joined, update))
