"""What publish() and update() share: get a slot to write, put things right after a failure, wait for acks, count."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from .. import _native
from ..errors import (
    ClosedError,
    DeviceFailed,
    ForkedHandle,
    ManifestMismatch,
    Poisoned,
    ProtocolError,
    ReaderStalled,
    WriterBusy,
)
from ..memory import reader_table
from ..memory.arena import Arena
from ..memory.exiting import stay_if_exiting
from ..memory.manifest import Key
from ..memory.plainly import plainly
from ..memory.process import Peers, ProcessState
from ..memory.reader_table import RowId
from .acks import name_with_pid, wait_for_acks
from .adopting import Adoption
from .checksums import ChecksumWriter
from .copy_plan import CopyPlan
from .device_writes import DeviceWrites, fetch_order
from .handing import HandOut
from .stale import StaleLeaves
from .stats import PublisherStats
from .timing import Samples, deadline_after, slice_until
from .tracing import Tracing, refuse_second

_log = logging.getLogger("shmsync")
_LOOK_AT_STOPPED = 0.005  # seconds between two looks at a stopped process


class Acks(NamedTuple):
    """Whose acks a call waits for."""

    wanted: bool
    workers: list[int] | None = None  # their indices; None: all workers


NO_ACKS = Acks(False)


@dataclass
class Counts:
    """What stats() reports, under the names of PublisherStats."""

    publishes: int = 0
    updates: int = 0
    bytes_copied: int = 0
    aborted: int = 0
    reaped: int = 0
    stalls: int = 0
    publish: Samples = field(default_factory=Samples)
    pin_wait: Samples = field(default_factory=Samples)
    ack_wait: Samples = field(default_factory=Samples)


def begin_all(sides: Sequence[WriteSide], deadline: float, version: int | None = None) -> None:
    """Get a slot to write in each of these, or raise with nothing written; the caller undoes.

    No gate stays closed for a process that is stopped: all are opened until it goes on, so that other readers go on
    with the old version. A reader that runs is waited for with the gates closed, since it leaves its section soon.

    version: the one that is written next, None for each one's own.
    """
    for side in sides:
        side.touched = False
        if side._died:
            side._died = {}
    while True:
        for side in sides:
            if version is not None:
                side.skip_to(version)
            if not side.begin(deadline):
                break
        else:
            return
        for each in sides:
            each.writer.abort()
        side.wait_while_stopped(deadline)


class WriteSide:
    """The writer of one arena. Hold `lock` around every other call; a second holder gets WriterBusy at once."""

    def __init__(self, arena: Arena, name: str, owner: int, timeout: float) -> None:
        self.arena = arena
        self.name = name
        self.timeout = timeout  # the arena's default, in seconds
        place = arena.on_device
        self._writer = _native.Writer(arena.control, owner, place is not None)
        self.later = None if place is None else DeviceWrites(place, arena.manifest, name, self._writer)  # on a device
        self.peers = Peers()
        self.counts = Counts()
        self.lock = _native.WriterLock()
        self.closed = False
        self.adopted: Adoption | None = None
        self.updating_thread: int | None = None
        self.waiting_thread: int | None = None  # the holder of the lock, while it waits for readers or acks
        self.tracing: Tracing | None = None
        self._trace_turn = threading.RLock()  # of who begins or ends a trace; a finalizer may, in the middle of it
        self._hand_out: HandOut | None = None
        self._watched = False
        self.touched = True  # may the write that is under way have changed a byte?
        # close() wants the lock. Who waits with the lock takes the request, and gives the lock up then.
        self._requests: list[object] = []
        self._heeded = False  # was it, in this wait?
        self._generation = _native.fork_generation()
        self._me = owner
        self._died: dict[RowId, int | str] = {}  # reaped in this call
        self._stale = StaleLeaves(arena.manifest, arena.slots)
        self._sums = None if arena.manifest.sums is None else ChecksumWriter(arena)
        arena.writer = weakref.ref(self)
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

    def checked(self, plan: CopyPlan, optional: Container[Key] | None = None) -> CopyPlan:
        """Return the plan, or raise if it cannot be published. `optional`: the leaves that it may lack; None: all."""
        if optional is not None and not plan.whole:
            missing = [leaf.name for leaf in plan.lacking if leaf.key not in optional]
            if missing:
                raise ManifestMismatch(
                    f"the weights lack {', '.join(missing)}; nothing was published, send all of them"
                )
        # An adopted module is the slab itself: its owner may publish it as it is after a failure.
        if not plan.whole or (plan.in_place and self.adopted is None):
            self.refuse_poisoned()
        return plan

    @property
    def writer(self) -> _native.Writer:
        """Who writes. On a device only behind ready(): until a version is committed, it is the device's."""
        if self.later is not None and self.later.under_way:
            raise ProtocolError(f"a version of arena {self.name!r} is under way, and nobody has waited for it")
        return self._writer

    def ready(self, deadline: float) -> None:
        """The gate of every use of the writer: raise if this process may not write, or while a version is under way.

        Call it first, with the lock. On a device it waits until that version is published. Raises as settle() does.
        """
        self.check()  # close() may have come between
        if self.later is not None:
            self.settle(deadline)

    @property
    def current(self) -> tuple[int, int]:
        """The published version, and its slot."""
        if self.later is not None:
            return self._writer.published
        return int(self._writer.version), int(self._writer.current_slot)

    def settle(self, deadline: float) -> None:
        """On a device: wait until the version that is under way is published.

        Raises WriterBusy when it is not in time, DeviceFailed when it never will be.
        """
        if self.later is None:
            return
        try:
            if self.later.settle(deadline):
                self._stale.written()
                if self._sums is not None:
                    self._sums.committed()
        except DeviceFailed:
            self.undo()
            raise

    def await_sources(self, plan: CopyPlan, deadline: float, after: object = None) -> None:
        """See that what the plan copies from devices is made before it is copied. `after`: as in publish().

        Into the host's memory the calling thread copies: it waits until they are made. Raises WriterBusy when they are
        not in time, DeviceFailed, ValueError and TypeError for `after`.
        """
        if self.later is not None:
            if after is not None:
                self.later.follow(after)
        else:
            fetch_order(plan.devices, self.name, deadline, after)

    def published(self, nanoseconds: int) -> bool:
        """Wait at most so long until nothing is under way. Raises DeviceFailed."""
        if self.later is None:
            return True
        try:
            self.settle(time.monotonic() + nanoseconds / 1e9)
        except WriterBusy:
            return False
        return True

    def publish(self, plan: CopyPlan, deadline: float, acks: Acks = NO_ACKS, version: int | None = None) -> int:
        """Carry out a checked plan. `version`: publish this one instead of the next."""
        if acks.wanted:
            self.refuse_own_section(acks)
        if plan.from_devices:
            self.await_sources(plan, deadline)
        plan.stage()
        started = time.perf_counter()
        try:
            self.begin_alone(deadline, version)
            self.write(plan)
            if self.later is not None:
                self.add_sums(deadline)
            version = self.commit()
        except BaseException:  # an interrupt may land anywhere
            self.undo()
            raise
        self.counts.publish.add(time.perf_counter() - started)
        if acks.wanted:
            self.wait_acks(version, acks, deadline)
        return version

    def write(self, plan: CopyPlan) -> None:
        """Write the plan into the slot that begin() chose. The caller commits."""
        if self.arena.slots > 1:
            self.carry(plan.given)
        self.touched = True
        kept = self.take_in()  # until the copy is done: the plan may read from there
        if self.later is None:
            plan.copy_to(self.address(), self._writer.slot)
        else:
            self.later.write(plan, self.address(), self._writer.slot)
        del kept
        if self._sums is not None and self.adopted is None:
            self._sums.begin(plan.given)
        self.counts.publishes += 1
        self.counts.bytes_copied += plan.nbytes

    def add_sums(self, deadline: float) -> None:
        """On a device: wait until what was written is there, and write its checksums. Before commit().

        Raises WriterBusy at the deadline, DeviceFailed; then nothing is published.
        """
        if self.later is not None and self._sums is not None:
            self.later.finish(deadline)
            self._sums.write(self._writer.slot)

    def commit(self) -> int:
        """Publish what was written; the new version. On a device: when it is written."""
        if self.later is not None:
            return self.later.commit()
        if self._sums is not None:  # under the same seqlock and gate as the weights
            self._sums.write(self._writer.slot)
        version = int(self._writer.commit())
        if self._sums is not None:
            self._sums.committed()
        self._stale.written()
        return version

    def watch_hand_out(self, weights: TensorDict) -> None:
        """update() gives its body these weights: watch whether the body uses them."""
        if self._hand_out is None:
            self._hand_out = HandOut(weights, self.arena.views(0, writable=True))
        self._watched = True
        self._hand_out.begin()

    def end_watch(self) -> None:
        """Watch no more; bytes may have changed if anything was handed out."""
        if self._watched and self._hand_out is not None:
            self._hand_out.end()
            self.touched = self.touched or self._hand_out.may_have_written()
            self._watched = False

    def protect(self) -> None:
        """Let the only slot be read-only for this process while readers may be in it, as docs/adr/0039 has it.

        Not on a device, whose memory has no protection, and where the system refuses.
        """
        if self.later is None:
            address = self._addresses[0]
            _native.faults_of_adopted(address)
            size = -(-self.arena.manifest.written_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if size and not self._writer.protect(address, size):
                _log.warning("arena %r: its memory cannot be protected from writes outside update()", self.name)

    def give_back(self) -> None:
        """Make the adopted parameters private again. Whatever comes between, they can be written afterwards."""
        adopted = self.adopted
        if adopted is None:
            return
        try:
            with plainly():
                adopted.give_back()
        except BaseException:  # an interrupt may land anywhere
            try:
                with plainly():
                    adopted.give_back()
            except BaseException:
                self._writer.unprotect()
            raise
        finally:
            self.adopted = None

    def set_updating(self, thread: int | None) -> None:
        """This thread is in update() from now on; None: no thread is."""
        self.updating_thread = thread
        if self.adopted is not None:
            self.adopted.mind_steps()

    def take_in(self) -> list[torch.Tensor]:
        """Bring what the adopted module's look() found into the slab; the memory that it had."""
        if self.adopted is None:
            return []
        self.touched |= self.adopted.moves
        kept = self.adopted.take_in()
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

    def begin_alone(self, deadline: float, version: int | None = None) -> None:
        """As begin_all() for this one: what nearly always happens, without its loops."""
        if version is not None:
            self.skip_to(version)
        if self._died:
            self._died = {}
        self.touched = False
        if self.later is not None or not self._writer.begin():
            begin_all([self], deadline, version)

    def begin(self, deadline: float) -> bool:
        """Get a slot to write, or raise with nothing written; the caller undoes. See begin_all().

        False: a stopped process is in the only slot. It may never continue, and the gate keeps all other readers out.
        """
        writer = self.writer
        if self.later is not None:
            self.later.ready()
        if writer.begin():
            return True
        started = time.perf_counter()
        try:
            with self._waiting():
                while True:
                    self._refuse_own_pins()
                    free = writer.wait_begin(slice_until(deadline))
                    stay_if_exiting()  # also in a slot that came free because the process exits
                    if free:
                        return True
                    if self.ending():
                        raise self._closed_meanwhile()
                    if not self._reap_dead() and time.monotonic() >= deadline:
                        self.counts.stalls += 1
                        stalled = self._stalled()
                        _log.warning("arena %r: %s", self.name, stalled)
                        raise stalled
                    if self._held_by_stopped():
                        return False
        finally:
            ended = writer.marked_at if writer.writing else 0  # there the write begins, in the trace too
            self._waited(self.counts.pin_wait, "wait for readers", started, int(writer.next_version), ended)

    def wait_while_stopped(self, deadline: float) -> None:
        """Wait, with the gate open, until the stopped process goes on, leaves or dies; at most to the deadline."""
        started = time.perf_counter()
        with self._waiting():
            while self._held_by_stopped() and time.monotonic() < deadline:
                if self.ending():
                    raise self._closed_meanwhile()
                time.sleep(_LOOK_AT_STOPPED)
        self._waited(self.counts.pin_wait, "wait for a stopped reader", started, self.next_version)

    def _held_by_stopped(self) -> bool:
        stopped = ProcessState.STOPPED
        return self.arena.slots == 1 and any(self.peers.state(each[1]) is stopped for each in self.writer.blockers())

    def _closed_meanwhile(self) -> ClosedError:
        return ClosedError(
            f"arena {self.name!r} was closed by another thread; nothing was published, make a new Publisher"
        )

    def address(self) -> int:
        """Where the slot to write starts."""
        return self._addresses[self._writer.slot]

    def carry(self, given: frozenset[int] | None) -> None:
        """Bring the slot to write up to date, but for the leaves at these offsets, which are written next.

        None: any leaf may be written, and all have their current values before.
        """
        to, source = self.address(), self._addresses[self.writer.current_slot]
        pieces = self._stale.begin(self.writer.slot, given)
        if pieces:
            moves = [(to + offset, source + offset, size) for offset, size in pieces]
            if self.later is None:
                _native.copy(moves)
            else:
                self.later.carry(moves)
            self.counts.bytes_copied += sum(size for _, size in pieces)

    def undo(self) -> None:
        """Take a failed write back: the arena is as before, or poisoned if its only slot may be half written."""
        self.counts.aborted += 1
        if self.later is not None:
            self.later.take_back()
        began = self._writer.marked_at if self._writer.writing else 0
        if self._sums is not None:
            self._sums.undone()
        if self.arena.slots == 1 and self.writer.writing and self.touched:
            self.writer.poison()
        else:
            self.writer.abort()
        trace = self._writer.trace
        if began and trace is not None:
            trace.span("failed publish", began, self.next_version)

    def refuse_poisoned(self) -> None:
        """Raise if the last update() failed half way."""
        if self.writer.poisoned:
            raise Poisoned(
                "the last update() failed half way, so this would leave torn weights; publish() all weights first",
                version=self.next_version,
            )

    def refuse_own_section(self, acks: Acks) -> None:
        """Raise if this call would wait for an ack that only its own thread could give."""
        held = self.arena.rows_held_by_this_thread()
        rows = [reader_table.read(self.arena.control, index) for index in held]
        if any(acks.workers is None or row.worker in acks.workers for row in rows):
            raise ProtocolError(
                "this thread is inside a read section, and wait= would wait for it to leave; leave the section first",
                version=self.next_version,
            )

    def wait_acks(self, version: int, acks: Acks, deadline: float) -> None:
        """Wait, after the commit, until the workers have applied the version. Raises WorkerDied, AckTimeout."""
        self.settle(deadline)
        started = time.perf_counter()
        try:
            workers, control = acks.workers, self.arena.control
            with self._waiting():
                wait_for_acks(
                    self.writer, control, self.peers, version, workers, deadline, self._me, self._died, self.ending
                )
        finally:
            self._waited(self.counts.ack_wait, "wait for acks", started, version)
            if len(self.peers):  # a worker was late; rows that were given back need no pidfd any more
                self.peers.keep_only({owner for _, owner in self.arena.control.owners()})

    def _waited(self, samples: Samples, what: str, started: float, version: int, ended: int = 0) -> None:
        """A wait of this kind is over. Times of time.perf_counter() and time.perf_counter_ns(); 0: now."""
        samples.add(time.perf_counter() - started)
        trace = self._writer.trace
        if trace is not None:
            trace.span(what, int(started * 1e9), version, ended)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._heeded = False
        self.waiting_thread = threading.get_ident()
        try:
            yield
        finally:
            self.waiting_thread = None

    def ending(self) -> bool:
        """In each slice of a wait: does close() want it to end?"""
        stay_if_exiting()
        if self._requests and not self._heeded:
            with suppress(IndexError):  # close() has taken it back
                self._requests.pop()
                self._heeded = True
        return self._heeded

    def open_to_kernels(self) -> None:
        """What the calling thread asks a device for now comes after what was carried."""
        if self.later is not None:
            self.later.open_to()

    def end(self) -> None:
        """The arena ends: nothing more is published."""
        if self.later is not None:
            self.later.take_back()
        self._writer.close()
        self._trace_no_more()

    def trace(self, file: str | os.PathLike[str]) -> Tracing:
        """As Publisher.trace()."""
        self.check()
        refuse_second(self.tracing, self.name)
        tracing = Tracing(self, file, deadline_after(None, self.timeout))
        with self._trace_turn:  # and not the writer's lock: who publishes at this moment shall not find it taken
            self.check()
            refuse_second(self.tracing, self.name)
            try:
                self.tracing = tracing
                tracing.begin()
            except BaseException:  # an interrupt may land anywhere
                self._trace_no_more()
                raise
        return tracing

    def write_trace(self, trace: _native.Trace | None, which: int) -> None:
        """As in Traced."""
        self._writer.trace = trace
        self.arena.control.ask_for_trace(which)

    def end_trace(self) -> None:
        """As in Traced."""
        if not self.closed and not self.in_parent:
            self._trace_no_more()

    def _trace_no_more(self) -> None:
        with self._trace_turn:
            self.write_trace(None, 0)
            tracing, self.tracing = self.tracing, None
            if tracing is not None:
                tracing.ended()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Hold the lock for close(), after the waits of another thread have ended.

        Raises WriterBusy as long as no wait has been ended: one that ended with ClosedError is followed by the close.
        """
        deadline = deadline_after(None, self.timeout)
        request = object()
        mine = self.lock.reserve(request)  # what a waiter gives up goes to close(), and not to a third thread
        try:
            if mine and self._others_wait():
                self._requests.append(request)
                while request in self._requests and self._others_wait() and time.monotonic() < deadline:
                    time.sleep(0.0005)
                try:
                    self._requests.remove(request)
                except ValueError:  # taken: that wait ends with ClosedError, so there is no way back
                    while self.lock.locked():
                        time.sleep(0.0005)
            self.lock.acquire(request)
            yield
        finally:
            if mine:
                self._requests.clear()
            self.lock.forgo(request)
            self.lock.release(request)

    def _others_wait(self) -> bool:
        return self.lock.locked() and self.waiting_thread not in (None, threading.get_ident())

    def stats(self) -> PublisherStats:
        """Counts and latencies so far."""
        counted = vars(self.counts).items()
        each: Any = {name: value.latency() if isinstance(value, Samples) else value for name, value in counted}
        return PublisherStats(version=self.current[0], **each)

    def _reap_dead(self) -> bool:
        """Free the rows of dead readers in the way; were there any?"""
        control = self.arena.control
        dead = [(number, owner) for number, owner, _ in self.writer.blockers() if not self.peers.alive(owner)]
        for row in dead:
            name = reader_table.name_of(control, row)
            # Owner 0 is no death: the row was given back between two looks, or its words are garbage.
            if control.reap(*row, self._me) and row[1] != 0:
                self._died[row] = name
                self.counts.reaped += 1
                _log.info("arena %r: reader %s died in a section; its row was taken back", self.name, name)
        return bool(dead)

    def _refuse_own_pins(self) -> None:
        held = self.arena.rows_held_by_this_thread()
        if held and any(index in held for index, _, _ in self.writer.blockers()):
            raise ProtocolError(
                "this thread is inside a read section of the slot that the publish needs; leave the section first",
                version=int(self.writer.version),
            )

    def _stalled(self) -> ReaderStalled:
        control = self.arena.control
        blockers = self.writer.blockers()
        rows = [(index, owner) for index, owner, _ in blockers]
        missing = [reader_table.name_of(control, row) for row in rows]
        held_by = ", ".join(self._holder(row) for row in rows) or "a reader"
        return ReaderStalled(
            f"version {self.next_version} was not written: the slot it needs is held by {held_by}; shorten the read "
            "sections, use more slots, or give more time with timeout=",
            version=self.next_version,
            missing=missing,
        )

    def _holder(self, row: RowId) -> str:
        stopped = self.peers.state(row[1]) is ProcessState.STOPPED
        return name_with_pid(self.arena.control, row) + (", which is stopped" if stopped else "")
