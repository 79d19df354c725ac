"""The writer of one arena: from what a user passes to a version that readers can apply.

Publisher shows it to users; schemes and Workers call it too. A version travels so: find the plan of its source, get a
slot (begin), copy, commit, wait for acks. In an arena on a device the copies are done later, and the device commits
behind them (device_writes.py): until then the native writer is the device's, so every call begins at ready(). So it is
in the host's memory too, once a GPU that had a source has pinned the slab.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import torch

from ... import _native
from ...errors import (
    ClosedError,
    DeviceFailed,
    ForkedHandle,
    ManifestMismatch,
    Poisoned,
    ProtocolError,
    ShmSyncError,
    WriterBusy,
)
from ...memory import segment
from ...memory.arena import Arena, create
from ...memory.devices import OnDevice
from ...memory.manifest import Key
from ...memory.process import Peers, me, stay_if_exiting
from ...memory.torch_modes import plainly, run_plainly
from ..deadlines import DEFAULT_TIMEOUT, Samples, deadline_after
from ..pickling import copy_by_value
from ..source.dtypes import Dtypes
from ..source.manifest_check import same_bytes
from ..source.sources import Filter, Weights, manifest_of, place_of
from ..stats import Counts, PublisherStats
from .acks import AckingWorkers, Acks
from .adoption import Adoption
from .copy_plan import CopyPlan, DirtyLeaves, PlanCache
from .device_writes import DeviceWrites, wait_for_sources
from .pin_wait import PinWait

if TYPE_CHECKING:
    from tensordict import TensorDictBase


_LAST_VERSION = 1.0  # seconds for one that is under way when the process ends


class Writer:
    """Makes an arena for some weights, and writes its versions. Not yet ready for readers: see open().

    Args:
        weights, name, slots, max_readers, device, dtype, timeout: those of Publisher, already checked.
        filter: which leaves the arena has.

    Attributes:
        source: what publish() reads when it is given nothing; None when it must be given some.
        lock: held around each call that writes; a second holder gets WriterBusy at once.
        timeout: the arena's default, in seconds.
        native: the writer's side of the protocol. Where there is a `device`, only behind ready().
        device: commits the versions, behind its copies. None: this process does, as long as no source was on a GPU.
        adopted: the module that is the slab.
        workers: those that apply its versions.
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
        self.name, self.timeout = name, timeout
        with plainly():
            tensors, manifest = manifest_of(weights, filter, dtype)
            place, any_device = place_of(tensors, device)
        del tensors
        self.arena, self._created = create(name, manifest, slots=slots, max_readers=max_readers, device=place)
        self.plans = PlanCache(self.arena, name, filter, any_device=any_device)
        on_device = self.arena.on_device
        self.native = _native.Writer(self.arena.control, me().owner, on_device is not None)
        self.device: DeviceWrites | None = None
        self._devices: list[DeviceWrites] = []  # this one, for the end
        if on_device is not None:
            self._commit_by(on_device)
        self.lock, self.peers, self.counts = _native.WriterLock(), Peers(), Counts()
        self.pin_wait = PinWait(self.arena, name, self.native, self.peers, me().owner)
        self.closed = False
        self._closing = 0  # threads that wait to close it
        self.adopted: Adoption | None = None
        self.updating_thread: int | None = None
        self.workers = AckingWorkers(self.pin_wait, name)
        self._touched = True  # may the write that is under way have changed a byte?
        self._generation = _native.fork_generation()
        self._dirty = DirtyLeaves(manifest, slots)
        self._addresses = [self.arena.slot_address(slot) for slot in range(slots)]
        copy_by_value()
        self._was_closed: list[bool] = []  # filled by close(), which holds the lock itself
        parts = self.arena, self._created, self.native, self._devices, self.peers
        self._finalizer = util.Finalize(self, _clean_up, (*parts, self._was_closed), exitpriority=20)

    def open(self, first_version: int | None = None) -> None:
        """Publish the first version, and let readers attach. Its number: this one, or the next of a dead publisher."""
        if first_version is None:
            first_version = self._created.follows + 1
        self.publish(None, deadline_after(None, self.timeout), version=first_version)
        self.settle(deadline_after(None, self.timeout))
        segment.make_ready(self._created)

    # ---- may this call write?

    @property
    def in_parent(self) -> bool:
        """Does it belong to a parent of this process, which was forked since?"""
        return self._generation != _native.fork_generation()

    def check(self) -> None:
        """Raise if this process may not write here (any more)."""
        stay_if_exiting()
        if self._generation != _native.fork_generation():
            raise ForkedHandle("this Publisher belongs to the parent process; a forked child may only subscribe")
        if self.closed:
            raise ClosedError(f"arena {self.name!r} is closed; make a new Publisher")

    def ready(self, deadline: float) -> None:
        """The gate of every call that writes: call it first, with the lock.

        Raises as check(), for close() may have come between. What an interrupt has left of a write is undone. With a
        device it waits until the version that is under way is published; raises WriterBusy when that is not in time,
        DeviceFailed when it never will be.
        """
        self.check()
        if self.device is not None and self.device.under_way:
            self.wait_until_published(deadline)
        if self.native.writing:
            self.undo()

    def settle(self, deadline: float) -> None:
        """With a device: wait until no version is under way, before others are told of it. Raises as ready()."""
        if self.device is not None:
            with self.lock:
                self.ready(deadline)

    @contextmanager
    def at_rest(self) -> Iterator[tuple[int, int]]:
        """The published version and its slot, which no call writes meanwhile. Raises Poisoned, WriterBusy."""
        self.check()
        with self.lock:
            self.ready(deadline_after(None, self.timeout))
            self.refuse_poisoned()
            yield self.current

    def wait_until_published(self, deadline: float) -> None:
        """With a device: wait until the version that is under way is published."""
        if self.device is None:
            return
        try:
            if self.device.wait_until_published(deadline):
                self._dirty.written()
        except DeviceFailed:
            self.undo()
            raise

    @property
    def current(self) -> tuple[int, int]:
        """The published version, and its slot."""
        return self.native.published

    @property
    def next_version(self) -> int:
        """The version that is being written, or will be written next."""
        return int(self.native.next_version)

    # ---- a version

    def publish(
        self,
        weights: Weights | None,
        deadline: float,
        acks: Acks | None = None,
        after: object = None,
        version: int | None = None,
        optional: Container[Key] | None = None,
    ) -> int:
        """As Publisher.publish(). `version`: this one instead of the next; `optional`: as in check_weights()."""
        self.check()
        with self.lock:
            if self.closed or self.device is not None or self.native.writing:
                self.ready(deadline)
            if self.workers.watch is not None:
                self.workers.watch.before_write()
            plan = self._plan(weights, optional)
            try:
                return self._write(plan, deadline, acks, after, version)
            finally:
                if plan is not None:
                    plan.release()

    def check_weights(self, weights: Weights, deadline: float, optional: Container[Key] | None = None) -> None:
        """Raise what publishing these would raise before anything is written.

        `optional`: the leaves that may be missing; None: all.
        """
        with self.lock:
            self.ready(deadline)
            plan = self._plan(weights, optional)
            if plan is not None:
                plan.release()

    def _plan(self, weights: Weights | None, optional: Container[Key] | None = None) -> CopyPlan | None:
        """The plan of weights that fit; None: the adopted module's, which is made once its parameters are back."""
        source = self.source if weights is None else weights
        if self.adopted is not None:
            if source is not self.adopted.source:
                raise ProtocolError(
                    f"arena {self.name!r} has adopted another module, whose parameters this would overwrite; write "
                    "them inside `with pub.update():`, call load_state_dict() of that module, or make a Publisher for "
                    "these weights",
                    version=self.next_version,
                )
            return self.adopted.look()  # its owner may publish it as it is after a failure
        plan = self.plans.find(source)
        try:
            if optional is not None and not plan.whole:
                missing = [leaf.name for leaf in plan.lacking if leaf.key not in optional]
                if missing:
                    raise ManifestMismatch(
                        f"the weights lack {', '.join(missing)}; nothing was published, send all of them"
                    )
            if not plan.whole or plan.in_place:
                self.refuse_poisoned()
        except BaseException:
            plan.release()
            raise
        return plan

    def _write(
        self,
        plan: CopyPlan | None,
        deadline: float,
        acks: Acks | None = None,
        after: object = None,
        version: int | None = None,
    ) -> int:
        """Carry out a checked plan; the new version."""
        if acks is not None:
            self.workers.refuse(acks)
        if plan is not None and (after is not None or not plan.conversions.none):
            if self._copied_later(plan) and self.device is not None:
                self.device.order(plan, after)
            else:
                wait_for_sources(plan, after, deadline, self.name)
        started = time.perf_counter()
        try:
            self._touched = False
            self.pin_wait.died.clear()
            if version is not None or self.device is not None or not self.native.begin():
                self.begin(deadline, version)
            self._touched = True
            if plan is None:
                assert self.adopted is not None
                plan = self.adopted.pull()
            if self.arena.slots > 1:
                self._carry(plan.given)
            slot = self.native.slot
            if self.device is None:
                plan.copy_to(self._addresses[slot], slot)
            else:
                self.device.write(plan, self._addresses[slot], slot, after)
            self.counts.bytes_copied += plan.nbytes
            version = self.commit() if self.device is not None or self.arena.slots > 1 else int(self.native.commit())
        except BaseException:  # an interrupt may land anywhere
            self.undo()
            raise
        if self.adopted is not None:
            self.adopted.watch_next()
        self.counts.publishes += 1
        self.counts.publish.add(time.perf_counter() - started)
        if acks is not None:
            self.wait_acks(version, acks, deadline)
        return version

    def _copied_later(self, plan: CopyPlan) -> bool:
        """Does the device copy this plan's converted leaves by itself? Into the host's memory only what lies on one."""
        if self.arena.on_device is not None:
            return True
        devices = plan.conversions.devices
        place = self.arena.pin(devices[0]) if len(devices) == 1 else None
        if place is not None and self.device is None:
            self._commit_by(place)
        return place is not None

    def _commit_by(self, place: OnDevice) -> None:
        self.device = DeviceWrites(place, self.arena.manifest, self.name, self.native)
        self._devices.append(self.device)

    def begin(self, deadline: float, version: int | None = None) -> None:
        """Get a slot to write, or raise with nothing written; the caller undoes. `version`: this one, not the next.

        The gate does not stay closed for a process that is stopped: it is opened until that goes on, so that other
        readers go on with the old version. A reader that runs is waited for with the gate closed, since it leaves its
        section soon.
        """
        self._touched = False
        self.pin_wait.died.clear()
        started = 0.0
        while True:
            if version is not None and version != self.next_version and not self.native.skip_to(version):
                raise ProtocolError(
                    f"the next version can be {self.next_version} or later, not {version}; versions only grow",
                    version=version,
                )
            if self.device is not None:
                self.device.ready(deadline)
            if self.native.begin():
                break
            started = started or time.perf_counter()
            if self.pin_wait.until_free(deadline, self._check_wait):
                break
            self.native.abort()
            self.pin_wait.while_stopped(deadline, self._check_wait)
        if started:
            self.counts.pin_wait.add(time.perf_counter() - started)

    def _carry(self, given: frozenset[int] | None) -> None:
        """Bring the slot to write up to date, but for the leaves at these offsets, which are written next.

        None: any leaf may be written, and all have their current values before.
        """
        to, source = self._addresses[self.native.slot], self._addresses[self.native.current_slot]
        pieces = self._dirty.begin(self.native.slot, given)
        if pieces:
            table = [(to + offset, source + offset, size) for offset, size in pieces]
            if self.device is None or self.arena.on_device is None:
                _native.copy(table)
            else:
                self.device.carry(table)
            self.counts.bytes_copied += sum(size for _, _, size in table)

    def commit(self) -> int:
        """Publish what was written; the new version. With a device: when it is written."""
        if self.device is not None:
            return self.device.commit()
        version = int(self.native.commit())
        self._dirty.written()
        return version

    def undo(self) -> None:
        """Take a failed write back: the arena is as before, or poisoned if its only slot may be half written."""
        self.counts.aborted += 1
        if self.device is not None:
            self.device.take_back()
        if self.arena.slots == 1 and self.native.writing and self._touched:
            self.native.poison()
        else:
            self.native.abort()

    def refuse_poisoned(self) -> None:
        """Raise if the last update() failed half way."""
        if self.native.poisoned:
            cure = "with all weights, or without an argument for those that the Publisher was made of"
            if self.adopted is not None:
                cure = "without an argument: it takes the adopted module as it is now"
            raise Poisoned(
                f"update() to version {self.next_version} of arena {self.name!r} failed half way, so this would leave "
                f"torn weights; call publish() first, {cure}",
                version=self.next_version,
            )

    # ---- update() and adopt()

    def begin_update(self, deadline: float) -> TensorDictBase:
        """Get a slot that has the current version, to be written in place; its weights. For Update, after ready()."""
        self.refuse_poisoned()
        if self.workers.watch is not None:
            self.workers.watch.before_write()
        looked = None
        if self.adopted is not None:
            self.adopted.warn_of_stray_writes()
            looked = self.adopted.look()
        slots = self.arena.slots
        weights = self.arena.weights(0, writable=True)  # the first time it imports tensordict: before the gate closes
        self.begin(deadline)
        if slots > 1:
            self._carry(None)
            weights = self.arena.weights(self.native.slot, writable=True)
        elif self.adopted is not None and looked is None:
            self._touched = True
            self.adopted.pull()
        if self.device is not None:
            self.device.open_to()
        self._touched = True
        self.updating_thread = threading.get_ident()
        return weights

    def end_update(self) -> int:
        """Publish what the body of an update() has written; the new version."""
        if self.adopted is not None:
            plan = self.adopted.look() or self.adopted.pull()  # the body may have replaced tensors too
            plan.copy_to(self._addresses[0], 0)
            plan.release()
            self.counts.bytes_copied += plan.nbytes
            self.adopted.watch_next()
        version = self.commit()
        self.updating_thread = None
        self.counts.updates += 1
        return version

    @run_plainly
    def adopt(self, publisher: Any, source: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        """As Publisher.adopt(). `publisher`: what a step keeps alive."""
        with self.lock:
            self.ready(deadline_after(None, self.timeout))
            adopted = self.adopted
            if adopted is None:
                adopted = Adoption(source, self.arena, self.name, self.plans, self, publisher)
                adopted.check_optimizers(optimizers)
                self._publish_if_different(source)
                adopted.pull(copy=False)
                adopted.watch_next()
                adopted.refuse_other_steps()
                self.adopted, self.source = adopted, source
            elif adopted.source is not source or not optimizers:
                raise ProtocolError("this arena has adopted a module already; make another Publisher for this one")
            else:
                adopted.check_optimizers(optimizers)
            adopted.step_inside_update(optimizers, publisher.update)

    def _publish_if_different(self, source: Weights) -> None:
        tensors, views = self.plans.collect(source), self.arena.views(0)
        if self.native.poisoned or any(
            tensor.dtype != views[key].dtype or not same_bytes(tensor, views[key]) for key, tensor in tensors.items()
        ):
            plan, deadline = self.plans.find(source), deadline_after(None, self.timeout)
            try:
                if plan.in_place:
                    self.refuse_poisoned()
                self._write(plan, deadline)
            finally:
                plan.release()
            self.wait_until_published(deadline)

    def forget_source(self) -> None:
        """Let go of the constructor's weights: from now on publish() must be given some."""
        self.source = None

    def wait_acks(self, version: int, acks: Acks, deadline: float) -> None:
        """Wait, after the commit, until the workers have applied the version. Raises WorkerDied, AckTimeout."""
        self.wait_until_published(deadline)
        started = time.perf_counter()
        try:
            self.workers.wait(version, acks, deadline, self._is_closing)
        finally:
            self.counts.ack_wait.add(time.perf_counter() - started)

    def _is_closing(self) -> bool:
        stay_if_exiting()
        return self._closing > 0

    def _check_wait(self) -> None:
        """In each slice of a wait for a slot: raise if it has to end."""
        if self._is_closing():
            raise ClosedError(f"arena {self.name!r} was closed by another thread; nothing was published")

    # ---- the end

    def stats(self) -> PublisherStats:
        """Counts and latencies so far."""
        counted = vars(self.counts).items()
        each: Any = {name: value.latency() if isinstance(value, Samples) else value for name, value in counted}
        return PublisherStats(version=self.current[0], reaped=self.pin_wait.reaped, stalls=self.pin_wait.stalls, **each)

    def close(self) -> None:
        """As Publisher.close()."""
        if self.closed or self.in_parent:
            return
        patience = 0.0 if util.is_exiting() else min(self.timeout, DEFAULT_TIMEOUT)
        deadline, holder = time.monotonic() + patience, object()
        self._closing += 1  # the waits of other threads end
        try:
            while True:
                try:
                    self.lock.acquire(holder)
                    break
                except WriterBusy:
                    if self.lock.mine or time.monotonic() >= deadline:
                        raise
                time.sleep(0.0005)
            if self.closed:  # another thread was quicker
                return
            adopted, self.adopted = self.adopted, None
            with suppress(DeviceFailed, WriterBusy):  # then readers keep the version before
                self.wait_until_published(deadline_after(None, self.timeout))
            try:
                if adopted is not None:
                    adopted.restore()
            finally:
                self.closed = True
                self.plans.forget()
                self._was_closed.append(True)
                self._finalizer()
        finally:
            self._closing -= 1
            self.lock.release(holder)


def _clean_up(
    arena: Arena,
    created: segment.Created,
    native: _native.Writer,
    devices: list[DeviceWrites],
    peers: Peers,
    closing: list[bool],
) -> None:
    """End the arena. Holds no Writer, so that it can run when that is collected, and at exit."""
    for device in devices:
        with suppress(ShmSyncError):  # close() has waited before
            device.wait(time.monotonic() + _LAST_VERSION)
        device.take_back()
    native.close()
    segment.withdraw(created)
    peers.close()
    # At the exit a daemon thread may still copy, and the memory goes with the process anyway.
    if closing or not util.is_exiting():
        arena.release()
