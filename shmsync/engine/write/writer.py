"""The writer of one arena: from what a user passes to a version that readers can apply.

Publisher shows it to users; schemes and Workers call it too. A version travels so: find the plan of its source, get a
slot (begin), copy, commit, wait for acks. Where a device commits, the native writer is the device's until then, so
every call begins at ready().
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from typing import TYPE_CHECKING, Any

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
from ...memory.arena import create
from ...memory.devices import Device
from ...memory.process import stay_if_exiting
from ...memory.torch_modes import plainly
from ..deadlines import DEFAULT_TIMEOUT, Samples, deadline_after
from ..pickling import copy_by_value
from ..source.dtypes import Dtypes
from ..source.sources import Filter, Weights, manifest_of
from ..stats import PublisherStats
from .acks import AckingWorkers, Acks
from .adoption import Adoption, Placement
from .copy_plan import CopyPlan, PlanCache
from .device_writes import DeviceWrites, wait_for_sources
from .slot_writer import SlotWriter

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_LAST_VERSION = 1.0  # seconds for one that is under way when the process ends


class Writer:
    """Makes an arena for some weights, and writes its versions. Not yet ready for readers: see open().

    Args:
        weights, name, slots, max_readers, dtype, timeout: those of Publisher, already checked.
        device: where the arena lies; None: in the host's memory.
        filter: which leaves the arena has; None: all.

    Attributes:
        source: what publish() reads when it is given nothing; None when it must be given some.
        lock: held around each call that writes; a second holder gets WriterBusy at once.
        timeout: the arena's default, in seconds.
        slots: what the versions are written with.
        native: the writer's side of the protocol. Where a device commits, only behind ready().
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
        device: Device | None,
        dtype: Dtypes,
        filter: Filter | None,
        timeout: float,
    ) -> None:
        self.source: Weights | None = weights
        self.name, self.timeout = name, timeout
        with plainly():
            manifest = manifest_of(weights, filter, dtype)
        self.arena, self._created = create(name, manifest, slots=slots, max_readers=max_readers, device=device)
        self.plans = PlanCache(self.arena, name, filter)
        self.slots = SlotWriter(self.arena, name)
        self.native, self.peers, self.counts = self.slots.native, self.slots.peers, self.slots.counts
        self.workers = AckingWorkers(self.slots)
        self.lock = _native.WriterLock()
        self.closed = False
        self.adopted: Adoption | None = None
        self.updating_thread: int | None = None
        self._generation = _native.fork_generation()
        copy_by_value()
        self._finalizer = util.Finalize(self, _clean_up, (self.slots, self._created, self.lock), exitpriority=20)

    def open(self, first_version: int | None = None) -> None:
        """Publish the first version, and let readers attach. Its number: this one, or the next of a dead publisher."""
        if first_version is None:
            first_version = self._created.follows + 1
        self.publish(None, deadline_after(None, self.timeout), version=first_version)
        self.wait_until_published(deadline_after(None, self.timeout))
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
        self.slots.wait_until_published(deadline)
        if self.native.writing:
            self.slots.undo()

    def wait_until_published(self, deadline: float) -> None:
        """With a device: wait until no version is under way, before others are told of it. Raises as ready()."""
        if self.slots.device_writes is not None:
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
        whole: bool = False,
    ) -> int:
        """As Publisher.publish(). `version`: this one instead of the next; `whole`: as in check_weights()."""
        self.check()
        with self.lock:
            if self.closed or self.slots.device_writes is not None or self.native.writing:
                self.ready(deadline)
            if self.workers.watch is not None:
                self.workers.watch.before_write()
            plan = self.plan_of(weights, whole)
            try:
                version = self.write(plan, deadline, after, version)
            finally:
                plan.release()
            if acks is not None:
                self.wait_acks(version, acks, deadline)
            return version

    def check_weights(self, weights: Weights, deadline: float, whole: bool = False) -> None:
        """Raise what publishing these would raise before anything is written.

        `whole`: no leaf may be missing, but for buffers that are never saved.
        """
        with self.lock:
            self.ready(deadline)
            self.plan_of(weights, whole).release()

    def plan_of(self, weights: Weights | None, whole: bool = False) -> CopyPlan | Placement:
        """How weights that fit are copied; of an adopted module perhaps what brings its parameters back first."""
        source = self.source if weights is None else weights
        if self.adopted is not None:
            if source is not self.adopted.source:
                raise ProtocolError(
                    f"arena {self.name!r} has adopted another module, whose parameters this would overwrite; write "
                    "them inside `with pub.update():`, call load_state_dict() of that module, or make a Publisher for "
                    "these weights",
                    version=self.next_version,
                )
            return self.adopted.plan()  # its owner may publish it as it is after a failure
        plan = self.plans.find(source)
        try:
            if whole and not plan.whole and (missing := [leaf.name for leaf in plan.lacking if leaf.saved]):
                raise ManifestMismatch(
                    f"the weights lack {', '.join(missing)}; nothing was published, send all of them"
                )
            if not plan.whole or plan.in_place:
                self.refuse_poisoned()
        except BaseException:
            plan.release()
            raise
        return plan

    def write(
        self, plan: CopyPlan | Placement, deadline: float, after: object = None, version: int | None = None
    ) -> int:
        """Carry out a checked plan; the new version. With the lock, behind ready()."""
        slots, native, adopted = self.slots, self.native, self.adopted
        devices = plan.conversions.devices if isinstance(plan, CopyPlan) else []
        if after is not None or devices:
            if (copier := self._device_copying(devices)) is None:
                wait_for_sources(devices, after, deadline, self.name)
            else:
                copier.order(devices, after)
        by_device, started = slots.device_writes, time.perf_counter()
        try:
            slots.touched = False
            slots.died.clear()
            if version is not None or by_device is not None or not native.begin():
                slots.begin(deadline, version)
            slots.touched = True
            if not isinstance(plan, CopyPlan):
                plan = plan.apply()
            if self.arena.slots > 1:
                slots.carry(plan.given)
            slot = native.slot
            if by_device is None:
                plan.copy_to(slots.addresses[slot], slot)
            else:
                by_device.write(plan, slots.addresses[slot], slot, after)
            self.counts.bytes_copied += plan.nbytes
            version = slots.commit() if by_device is not None or self.arena.slots > 1 else int(native.commit())
        except BaseException:  # an interrupt may land anywhere
            slots.undo()
            raise
        if adopted is not None:
            adopted.watch_next()
        self.counts.publishes += 1
        self.counts.publish.add(time.perf_counter() - started)
        return version

    def _device_copying(self, devices: list[Device]) -> DeviceWrites | None:
        """Let a device copy what lies on these by itself, and commit from now on; None: the host copies it.

        It is that of the arena. Into the host's memory it is the one that all of them lie on, if it can pin the slab.
        """
        if self.arena.device_slab is None:
            place = self.arena.pin(devices[0]) if len(devices) == 1 else None
            if place is None:
                return None
            if self.slots.device_writes is None:
                self.slots.commit_by(place)
        return self.slots.device_writes

    def refuse_poisoned(self) -> None:
        """Raise if the last update() failed half way."""
        if self.native.poisoned:
            cure = "with all weights, or without an argument for those that the Publisher was made of"
            if self.adopted is not None:
                cure = "without an argument: it takes the adopted module as it is now; load good weights into it before"
            raise Poisoned(
                f"update() to version {self.next_version} of arena {self.name!r} failed half way, so this would leave "
                f"torn weights; call publish() first, {cure}",
                version=self.next_version,
            )

    # ---- update()

    def begin_update(self, deadline: float) -> TensorDictBase:
        """Get a slot that has the current version, to be written in place; its weights. For Update, after ready()."""
        self.refuse_poisoned()
        if self.workers.watch is not None:
            self.workers.watch.before_write()
        plan = None
        if self.adopted is not None:
            self.adopted.warn_of_stray_writes()
            plan = self.adopted.plan()
        slots = self.slots
        weights = self.arena.weights(0, writable=True)  # the first time it imports tensordict: before the gate closes
        slots.begin(deadline)
        if self.arena.slots > 1:
            slots.carry(None)
            weights = self.arena.weights(self.native.slot, writable=True)
        elif isinstance(plan, Placement):
            slots.touched = True
            plan.apply()
        if slots.device_writes is not None:
            slots.device_writes.open_to()
        slots.touched = True
        self.updating_thread = threading.get_ident()
        return weights

    def end_update(self) -> int:
        """Publish what the body of an update() has written; the new version."""
        if self.adopted is not None:
            plan = self.adopted.plan()
            if isinstance(plan, Placement):  # the body has replaced tensors
                plan = plan.apply()
            plan.copy_to(self.slots.addresses[0], 0)
            plan.release()
            self.counts.bytes_copied += plan.nbytes
            self.adopted.watch_next()
        version = self.slots.commit()
        self.updating_thread = None
        self.counts.updates += 1
        return version

    def wait_acks(self, version: int, acks: Acks, deadline: float) -> None:
        """Wait, after the commit, until the workers have applied the version. Raises WorkerDied, AckTimeout."""
        self.slots.wait_until_published(deadline)
        started = time.perf_counter()
        try:
            self.workers.wait(version, acks, deadline)
        finally:
            self.counts.ack_wait.add(time.perf_counter() - started)

    # ---- the end

    def stats(self) -> PublisherStats:
        """Counts and latencies so far."""
        counted = vars(self.counts).items()
        each: Any = {name: value.latency() if isinstance(value, Samples) else value for name, value in counted}
        return PublisherStats(version=self.current[0], **each)

    def close(self) -> None:
        """As Publisher.close()."""
        if self.closed or self.in_parent:
            return
        patience = 0.0 if util.is_exiting() else min(self.timeout, DEFAULT_TIMEOUT)
        deadline, holder = time.monotonic() + patience, object()
        self.slots.closing += 1  # the waits of other threads end
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
                self.slots.wait_until_published(deadline_after(None, self.timeout))
            try:
                if adopted is not None:
                    adopted.restore()
            finally:
                self.closed = True
                self.plans.forget()
                self._finalizer()
        finally:
            self.slots.closing -= 1
            self.lock.release(holder)


def _clean_up(slots: SlotWriter, created: segment.Created, lock: _native.WriterLock) -> None:
    """End the arena. Holds no Writer, so that it can run when that is collected, and at exit."""
    if slots.device_writes is not None:
        with suppress(ShmSyncError):  # close() has waited before
            slots.device_writes.wait(time.monotonic() + _LAST_VERSION)
        slots.device_writes.take_back()
    slots.native.close()
    segment.withdraw(created)
    slots.peers.close()
    # At the exit a daemon thread may still copy, and the memory goes with the process anyway.
    if lock.mine or not util.is_exiting():
        slots.arena.release()
