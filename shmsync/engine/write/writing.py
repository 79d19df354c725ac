"""The steps of a version, which publish() and update() share: get a slot, fill it, commit or undo, wait for acks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ... import _native
from ...errors import ClosedError, DeviceFailed, ForkedHandle, Poisoned, ProtocolError, WorkerDied
from ...memory.arena import Arena
from ...memory.system.exiting import stay_if_exiting
from ...memory.system.process import Peers
from ..adopt.adopting import Adoption
from ..copy.copy_plan import CopyPlan
from ..deadlines import Samples
from ..stats import Counts, PublisherStats
from .acks import Acks, WorkerWatch, wait_for_acks
from .close_request import CloseRequest
from .device_writes import DeviceWrites
from .dirty_leaves import DirtyLeaves
from .host_writes import HostWrites
from .pin_wait import PinWait


class WriteSide:
    """The writer of one arena. Hold `lock` around every other call; a second holder gets WriterBusy at once."""

    def __init__(self, arena: Arena, name: str, owner: int, timeout: float) -> None:
        self.arena = arena
        self.name = name
        self.timeout = timeout  # the arena's default, in seconds
        place = arena.on_device
        self._writer = _native.Writer(arena.control, owner, place is not None)
        self.writes = (
            HostWrites(name, self._writer) if place is None else DeviceWrites(place, arena.manifest, name, self._writer)
        )
        self.peers = Peers()
        self.counts = Counts()
        self.lock = _native.WriterLock()
        self.closed = False
        self.adopted: Adoption | None = None
        self.updating_thread: int | None = None
        self.worker_watch: WorkerWatch | None = None
        self.not_started: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # Workers, and how many
        self.close_request = CloseRequest(self.lock)
        self.pin_wait = PinWait(arena, name, self._writer, self.peers, owner, self.close_request)
        self.touched = True  # may the write that is under way have changed a byte?
        self._generation = _native.fork_generation()
        self._dirty = DirtyLeaves(arena.manifest, arena.slots)
        self._addresses = [arena.slot_address(slot) for slot in range(arena.slots)]

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

    @property
    def writer(self) -> _native.Writer:
        """The writer. On a device only behind ready(): until a version is committed, it is the device's."""
        if self.writes.under_way:
            raise ProtocolError(f"a version of arena {self.name!r} is under way, and no call has waited for it")
        return self._writer

    def ready(self, deadline: float) -> None:
        """The gate of every use of the writer: raise if this process may not write, or while a version is under way.

        Call it first, with the lock. On a device it waits until that version is published, and raises as
        wait_until_published() does.
        """
        self.check()  # close() may have come between
        if self.writes.under_way:
            self.wait_until_published(deadline)

    @property
    def current(self) -> tuple[int, int]:
        """The published version, and its slot."""
        return self.writes.published

    def wait_until_published(self, deadline: float) -> None:
        """On a device: wait until the version that is under way is published.

        Raises WriterBusy when it is not in time, DeviceFailed when it never will be.
        """
        try:
            if self.writes.wait_until_published(deadline):
                self._dirty.written()
        except DeviceFailed:
            self.undo()
            raise

    def write(self, plan: CopyPlan, after: object = None) -> None:
        """Write the plan into the slot that begin() chose. The caller commits. `after`: as in publish()."""
        if self.arena.slots > 1:
            self.carry(plan.given)
        self.touched = True
        kept = self.pull()  # until the copy is done: the plan may read from there
        self.writes.write(plan, self.address(), self._writer.slot, after)
        del kept
        self.counts.bytes_copied += plan.nbytes

    def commit(self) -> int:
        """Publish what was written; the new version. On a device: when it is written."""
        version = self.writes.commit()
        if self.writes.at_once:
            self._dirty.written()
        return version

    def restore_adopted(self) -> None:
        """Make the adopted parameters private again."""
        try:
            if self.adopted is not None:
                self.adopted.restore()
        finally:
            self.adopted = None

    def watch_workers(self, look: Callable[[int], None], explains: Callable[[WorkerDied], bool]) -> None:
        """Let waits for acks call these from now on; see WorkerWatch. `worker_watch = None` ends it."""
        self.worker_watch = WorkerWatch(look, explains)

    def refuse_not_started(self, workers: list[int] | None) -> None:
        """Raise if a call would wait for these workers (None: all), and Workers that have them were not started."""
        for count in self.not_started.values():
            if workers is None or any(worker < count for worker in workers):
                raise ProtocolError(
                    f"the {count} Workers of arena {self.name!r} were made but not started, so they cannot "
                    "apply a version. Write `with shmsync.Workers(...) as workers:`, or call workers.start() first",
                    version=self.next_version,
                )

    def set_updating(self, thread: int | None) -> None:
        """This thread is in update() from now on; None: no thread is."""
        self.updating_thread = thread
        if self.adopted is not None:
            self.adopted.watch_optimizer()

    def pull(self) -> list[torch.Tensor]:
        """Bring what the adopted module's look() found into the slab; the memory that it had."""
        if self.adopted is None:
            return []
        self.touched |= self.adopted.moves
        kept = self.adopted.pull()
        self.counts.bytes_copied += sum(tensor.nbytes for tensor in kept)
        return kept

    @property
    def next_version(self) -> int:
        """The version that is being written, or will be written next."""
        return int(self.writer.next_version)

    def skip_to(self, version: int) -> None:
        """Number the next version `version`; they only grow."""
        if version != self.next_version and not self.writer.skip_to(version):
            raise ProtocolError(
                f"the next version can be {self.next_version} or later, not {version}; versions only grow",
                version=version,
            )

    def begin_at_once(self, version: int | None = None) -> bool:
        """Get a slot to write if no wait is needed, which is nearly always; False: call begin() of publishing."""
        if version is not None:
            self.skip_to(version)
        self.pin_wait.died.clear()
        self.touched = False
        return self.writes.at_once and self._writer.begin()

    def begin(self, deadline: float) -> bool:
        """Get a slot to write, or raise with nothing written; the caller undoes. publishing.begin() calls it.

        False: a stopped process is in the only slot. It may never continue, and the gate keeps all other readers out.
        """
        writer = self.writer
        self.writes.ready(deadline)
        if writer.begin():
            return True
        started = time.perf_counter()
        try:
            return self.pin_wait.until_free(deadline)
        finally:
            self.counts.pin_wait.add(time.perf_counter() - started)

    def wait_while_stopped(self, deadline: float) -> None:
        """Wait, with the gate open, until the stopped process goes on, leaves or dies; at most to the deadline."""
        started = time.perf_counter()
        self.pin_wait.while_stopped(deadline)
        self.counts.pin_wait.add(time.perf_counter() - started)

    def address(self) -> int:
        """Where the slot to write starts."""
        return self._addresses[self._writer.slot]

    def carry(self, given: frozenset[int] | None) -> None:
        """Bring the slot to write up to date, but for the leaves at these offsets, which are written next.

        None: any leaf may be written, and all have their current values before.
        """
        to, source = self.address(), self._addresses[self.writer.current_slot]
        pieces = self._dirty.begin(self.writer.slot, given)
        if pieces:
            self.writes.carry([(to + offset, source + offset, size) for offset, size in pieces])
            self.counts.bytes_copied += sum(size for _, size in pieces)

    def undo(self) -> None:
        """Take a failed write back: the arena is as before, or poisoned if its only slot may be half written."""
        self.counts.aborted += 1
        self.writes.take_back()
        if self.arena.slots == 1 and self.writer.writing and self.touched:
            self.writer.poison()
        else:
            self.writer.abort()

    def refuse_poisoned(self) -> None:
        """Raise if the last update() failed half way."""
        if self.writer.poisoned:
            whole = "with all weights, or without an argument for those that the Publisher was made of"
            if self.adopted is not None:
                whole = "without an argument: it takes the adopted module as it is now"
            raise Poisoned(
                f"update() to version {self.next_version} of arena {self.name!r} failed half way, so this would leave "
                f"torn weights; call publish() first, {whole}",
                version=self.next_version,
            )

    def refuse_wait(self, acks: Acks) -> None:
        """Raise if this call would wait for an ack that only its own thread could give, or for Workers not started."""
        if self.not_started:
            self.refuse_not_started(acks.workers)
        rows = [self.arena.control.row(index) for index in self.arena.rows_held_by_this_thread()]
        if any(acks.workers is None or row.worker in acks.workers for row in rows):
            raise ProtocolError(
                "this thread is inside a read section, and wait= would wait for it to leave; leave the section first",
                version=self.next_version,
            )

    def wait_acks(self, version: int, acks: Acks, deadline: float) -> None:
        """Wait, after the commit, until the workers have applied the version. Raises WorkerDied, AckTimeout."""
        self.wait_until_published(deadline)
        started = time.perf_counter()
        try:
            watch = self.worker_watch

            def ending() -> bool:
                if watch is not None:
                    watch.look(version)
                return self.close_request.pending()

            with self.close_request.waiting():
                try:
                    wait_for_acks(self.pin_wait, version, acks.workers, deadline, ending)
                except WorkerDied as error:
                    if watch is None or not watch.explains(error):
                        raise
                ending()
        finally:
            self.counts.ack_wait.add(time.perf_counter() - started)
            if len(self.peers):  # a worker was late; rows that were given back need no pidfd any more
                self.peers.keep_only({owner for _, owner in self.arena.control.owners()})

    def end(self) -> None:
        """The arena ends: nothing more is published."""
        self.writes.take_back()
        self._writer.close()

    def stats(self) -> PublisherStats:
        """Counts and latencies so far."""
        counted = vars(self.counts).items()
        each: Any = {name: value.latency() if isinstance(value, Samples) else value for name, value in counted}
        waits = self.pin_wait
        return PublisherStats(version=self.current[0], reaped=waits.reaped, stalls=waits.stalls, **each)
