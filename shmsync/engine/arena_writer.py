"""The writer of one arena: from what a user passes to a version that readers can apply.

Publisher shows this to users; the schemes publish through it.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ManifestMismatch, ProtocolError, WriterBusy
from ..memory.arena import create
from ..memory.control import segment
from ..memory.control.reader_figures import RowId
from ..memory.manifest import Key, Manifest
from ..memory.system.exiting import exiting, watch_exit
from ..memory.system.process import me, pid_of
from ..memory.torch_modes import plainly, run_plainly
from .adopt.adopting import Adoption
from .by_value import copy_by_value
from .copy.copy_plan import CopyPlan
from .copy.plan_cache import PlanCache
from .deadlines import deadline_after
from .source.arena_device import place_for
from .source.dtypes import Dtypes, cast_leaves, kept_leaves
from .source.leaf_check import problem_with
from .source.manifest_check import same_bytes
from .source.sources import EVERYTHING, Filter, Weights, check_keys, collect, not_saved
from .write.acks import Acks
from .write.publishing import publish_plan
from .write.update import load_inside_update, step_inside_update
from .write.writing import WriteSide

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class ArenaWriter:
    """Makes an arena for some weights, and publishes in it. Not yet ready for readers: see open().

    Args:
        weights, name, slots, max_readers, device, dtype, timeout: those of Publisher, already checked.
        filter: which leaves the arena has.

    Attributes:
        source: what publish() reads when it is given nothing; None when it must be given some.
        plans: the plan cache. Call plans.release() after each plan(), so that it keeps no weights of a caller.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        *,
        slots: int,
        max_readers: int,
        device: torch.device | str | None,
        dtype: Dtypes,
        filter: Filter,
        timeout: float,
    ) -> None:
        self.source: Weights | None = weights
        self._filter = filter
        with plainly():
            tensors, manifest = _manifest_of(weights, filter, dtype)
            place = place_for(tensors, device)
        del tensors
        self.arena, self._created = create(name, manifest, slots=slots, max_readers=max_readers, device=place.device)
        self.side = WriteSide(self.arena, name, me().owner, timeout)
        self.plans = PlanCache(self.arena, name, filter, any_device=place.any_device)
        watch_exit()
        copy_by_value()
        self._closing: list[bool] = []  # filled by close(), which holds the writer's lock itself
        self._finalizer = util.Finalize(self, _clean_up, (self._created, self.side, self._closing), exitpriority=20)

    def open(self, first_version: int = 1) -> None:
        """Publish the first version, under this number, and let readers attach."""
        timeout = self.side.timeout
        self.publish(None, deadline_after(None, timeout), version=first_version)
        self.side.wait_until_published(deadline_after(None, timeout))
        segment.make_ready(self._created)

    @property
    def weights(self) -> TensorDictBase:
        """The published weights, zero-copy and read-only."""
        self.side.check()
        return self.arena.weights(self.side.current[1])

    def publish(
        self,
        weights: Weights | None,
        deadline: float,
        acks: Acks | None = None,
        after: object = None,
        version: int | None = None,
        optional: Container[Key] | None = None,
    ) -> int:
        """As Publisher.publish(). `version`: publish this one instead of the next; `optional`: as in plan()."""
        self.side.check()
        with self.side.lock:
            self.side.ready(deadline)
            try:
                plan = self.plan(weights, optional)
                return publish_plan(self.side, plan, deadline, acks, version, after)
            finally:
                self.plans.release()

    def publish_like(self, weights: Weights, deadline: float) -> int | None:
        """As publish(), of a TensorDict or dict with every leaf that is like an earlier one; else None.

        What was checked of that one holds for this one: its keys, and what its tensors are.
        """
        side = self.side
        side.check()
        with side.lock:
            side.ready(deadline)
            try:
                plan = self.plans.find_like(weights) if side.adopted is None and side.writes.at_once else None
                if plan is None or plan.kind is not type(weights) or not plan.whole or plan.in_place:
                    return None
                return publish_plan(side, plan, deadline)
            finally:
                self.plans.release()

    def plan(self, weights: Weights | None, optional: Container[Key] | None = None) -> CopyPlan:
        """The plan to publish these weights (None: the source), all checked. With the writer's lock.

        `optional`: the leaves that may be missing; None: all. Raises ManifestMismatch, and Poisoned for a part of the
        weights after an update() that failed.
        """
        side, source = self.side, self.source if weights is None else weights
        if side.adopted is not None:
            side.adopted.look()
        plan = self.plans.find(source, default=source is self.source)
        if optional is not None and not plan.whole:
            missing = [leaf.name for leaf in plan.lacking if leaf.key not in optional]
            if missing:
                raise ManifestMismatch(
                    f"the weights lack {', '.join(missing)}; nothing was published, send all of them"
                )
        # An adopted module is the slab itself: its owner may publish it as it is after a failure.
        if not plan.whole or (plan.in_place and self.side.adopted is None):
            self.side.refuse_poisoned()
        return plan

    def check(self, weights: Weights, optional: Container[Key] | None = None) -> None:
        """Raise what publishing these would raise before anything is written. `optional`: as in plan()."""
        with self.side.lock:
            self.side.ready(deadline_after(None, self.side.timeout))
            try:
                self.plan(weights, optional)
            finally:
                self.plans.release()

    @run_plainly
    def adopt(self, publisher: object, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """As Publisher.adopt(). `publisher`: what a step keeps alive."""
        side = self.side
        with side.lock:
            side.ready(deadline_after(None, side.timeout))
            if side.adopted is None:
                self._adopt(module, optimizers)
            elif side.adopted.module is not module or not optimizers:
                raise ProtocolError("this arena has adopted a module already; make another Publisher for this one")
            else:
                side.adopted.check_optimizers(optimizers)
            step_inside_update(optimizers, publisher, side)
            load_inside_update(publisher, side)

    def _adopt(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        side = self.side
        plan = self.plans.make(module)
        if not plan.whole:
            raise ManifestMismatch(
                f"the module to adopt lacks {', '.join(leaf.name for leaf in plan.lacking)}, which arena {side.name!r} "
                "has; pass the module that was published, or make a new Publisher for this one"
            )
        adoption = Adoption(module, plan.tensors, self.arena, side.name, self._filter, optimizers)
        adoption.check_optimizers(optimizers)
        deadline = deadline_after(None, side.timeout)
        if self._differs(plan.tensors):
            if plan.in_place:
                side.refuse_poisoned()
            publish_plan(side, plan, deadline)
            side.wait_until_published(deadline)
        side.adopted = adoption
        adoption.move_in()
        self.source = module
        self.plans.forget()

    def _differs(self, tensors: Mapping[Key, torch.Tensor]) -> bool:
        views = self.arena.views(0)
        return self.side.writer.poisoned or any(
            tensor.dtype != views[key].dtype or not same_bytes(tensor, views[key]) for key, tensor in tensors.items()
        )

    def forget_source(self) -> None:
        """Let go of the constructor's weights: from now on publish() must be given some."""
        self.source = None
        self.plans.forget()

    # Which workers have applied what.

    def applied_by(self, version: int) -> list[int]:
        """The workers whose last ack is for this version, including those that have left or died since."""
        rows = self.arena.control.rows(left=True)
        return [row.worker for row in rows if row.worker is not None and row.acked == version]

    def forget_acks(self, worker: int) -> None:
        """Another process is `worker` from now on; what those before it applied, who are gone, is not its doing."""
        control, mine = self.arena.control, me().owner
        for row in control.rows(left=True):
            if row.worker != worker:
                continue
            if row.owner == 0 or (not self.side.peers.alive(row.owner) and control.reap(*row.id, mine)):
                control.forget(row.number, mine)

    def free_rows_of(self, pid: int) -> None:
        """This process was ended on purpose: its rows are no deaths that a later wait should report."""
        control, mine = self.arena.control, me().owner
        for row in control.rows():
            if pid_of(row.owner) == pid and not self.side.peers.alive(row.owner):
                control.reap(*row.id, mine)

    def attached_rows(self) -> dict[int, RowId]:
        """The row of each attached worker, by its index."""
        return {row.worker: row.id for row in self.arena.control.rows() if row.worker is not None}

    def wait_rows(self, version: int, rows: list[RowId], nanoseconds: int) -> list[RowId]:
        """Wait until these rows have acked, at most `nanoseconds`; returns those that have not. Raises DeviceFailed."""
        side = self.side
        try:
            side.wait_until_published(time.monotonic() + nanoseconds / 1e9)
        except WriterBusy:
            return rows
        return list(side.writer.wait_acks(version, rows, nanoseconds))

    def close(self) -> None:
        """As Publisher.close()."""
        side = self.side
        if side.closed or side.in_parent:
            return
        with side.close_request.exclusive(deadline_after(None, side.timeout)):
            try:
                side.restore_adopted()
            finally:
                side.closed = True
                self.plans.forget()
                self._closing.append(True)
                self._finalizer()


def _manifest_of(weights: Weights, filter: Filter, dtype: Dtypes) -> tuple[dict[Key, Any], Manifest]:
    everything = collect(weights, EVERYTHING, watch=False).tensors
    tensors = everything
    if filter.filters:
        tensors = {key: value for key, value in everything.items() if filter.admits(".".join(key))}
    check_keys(tensors)
    problems = filter.idle(".".join(key) for key in everything) if filter.filters else []
    problems += [f"{'.'.join(key)} {reason}" for key, value in tensors.items() if (reason := problem_with(value))]
    if not tensors and not problems:
        problems = ["there is no tensor to publish (after include= and exclude=)"]
    if problems:
        raise ManifestMismatch("these weights cannot be published: " + "; ".join(problems))
    dtypes = cast_leaves(tensors, dtype, kept_leaves(weights, everything) if isinstance(dtype, torch.dtype) else ())
    unsaved = not_saved(weights) if isinstance(weights, nn.Module) else ()
    return tensors, Manifest.of(tensors, dtypes=dtypes, filtered=filter.filters, unsaved=unsaved)


def _clean_up(created: segment.Created, side: WriteSide, closing: list[bool]) -> None:
    """End the arena. Holds no ArenaWriter, so that it can run when that is collected, and at exit."""
    try:
        if not exiting():  # of a publisher that was collected
            side.restore_adopted()
    finally:
        side.end()
        try:  # before unlock(): the process that has the lock of an unready segment may remove its name and use it
            segment.withdraw(side.name, created.inode)
        finally:
            created.unlock()
        side.peers.close()
    if closing or not exiting():  # else a daemon thread may still copy, and the memory goes with the process anyway
        side.arena.release()
