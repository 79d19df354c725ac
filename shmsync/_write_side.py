"""What publish() and update() share: get a slot to write, put things right after a failure, wait for acks, count."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from . import _native, _rows
from ._acks import wait_for_acks
from ._process import Peers
from .arena import Arena
from .errors import Poisoned, ProtocolError, ReaderStalled, WriterBusy
from .manifest import Leaf
from .stats import PublisherStats, Samples

_SLICE_NS = 50_000_000

Wanted = list[int] | None  # whose acks are waited for; None: everybody's


@dataclass
class Counts:
    """What stats() reports."""

    publishes: int = 0
    updates: int = 0
    bytes_copied: int = 0
    aborted: int = 0
    reaped: int = 0
    publish: Samples = field(default_factory=Samples)
    pin_wait: Samples = field(default_factory=Samples)
    ack_wait: Samples = field(default_factory=Samples)


class WriteSide:
    """The writer of one arena. Its lock refuses instead of waiting: an arena has one writer at a time."""

    def __init__(self, arena: Arena, owner: int) -> None:
        self.arena = arena
        self.writer = _native.Writer(arena.control, owner)
        self.peers = Peers()
        self.counts = Counts()
        self.updating_thread: int | None = None
        self._me = owner
        self._addresses = [arena.slot_address(slot) for slot in range(arena.slots)]
        self._lock = threading.Lock()

    def __enter__(self) -> WriteSide:
        """Begin a writer call; raises WriterBusy when another is under way."""
        if not self._lock.acquire(blocking=False):
            raise WriterBusy("another publish() or update() of this Publisher is under way; let it finish first")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def next_version(self) -> int:
        """The one that is written, or written next."""
        return int(self.writer.version) + 1

    def begin(self, deadline: float) -> None:
        """Get a slot to write, or raise with nothing written; the caller undoes."""
        writer = self.writer
        if writer.begin():
            return
        started = time.perf_counter()
        while True:
            self._refuse_own_pins()
            remaining = int(max(0.0, min(deadline - time.monotonic(), 1.0)) * 1e9)
            if writer.wait_begin(min(remaining, _SLICE_NS)):
                break
            if not self._reap_dead() and time.monotonic() >= deadline:
                raise self._stalled()
        self.counts.pin_wait.add(time.perf_counter() - started)

    def address(self) -> int:
        """Where the slot to write starts."""
        return self._addresses[self.writer.slot]

    def carry(self, leaves: list[Leaf]) -> None:
        """Copy the current values of these leaves into the slot being written."""
        to, source = self.address(), self._addresses[self.writer.current_slot]
        if leaves:
            _native.copy([(to + leaf.offset, source + leaf.offset, leaf.nbytes) for leaf in leaves])
            self.counts.bytes_copied += sum(leaf.nbytes for leaf in leaves)

    def carry_all(self) -> None:
        """The same for the whole slot."""
        to, source = self.address(), self._addresses[self.writer.current_slot]
        _native.copy([(to, source, self.arena.manifest.used_bytes)])
        self.counts.bytes_copied += self.arena.manifest.used_bytes

    def undo(self) -> None:
        """After a failure: as before, or poisoned if the only slot may be half written."""
        self.counts.aborted += 1
        if self.arena.slots == 1 and self.writer.writing:
            self.writer.poison()
        else:
            self.writer.abort()

    def refuse_poisoned(self) -> None:
        """Raise if the last update() failed half way."""
        if self.writer.poisoned:
            raise Poisoned(
                "the last update() failed half way, so this would leave torn weights; publish() all weights first",
                version=self.next_version,
            )

    def refuse_own_section(self, wanted: Wanted) -> None:
        """Raise if this call would wait for an ack that only its own thread could give."""
        held = self.arena.rows_held_by_this_thread()
        rows = [_rows.read(self.arena.control, index) for index in held]
        if any(wanted is None or row.worker in wanted for row in rows):
            raise ProtocolError(
                "this thread is inside a read section, and wait= would wait for it to leave; leave the section first",
                version=self.next_version,
            )

    def wait_acks(self, version: int, wanted: Wanted, deadline: float) -> None:
        """After the commit."""
        started = time.perf_counter()
        try:
            wait_for_acks(self.writer, self.arena.control, self.peers, version, wanted, deadline, self._me)
        finally:
            self.counts.ack_wait.add(time.perf_counter() - started)

    def stats(self) -> PublisherStats:
        """Counts and latencies so far."""
        counts = self.counts
        return PublisherStats(
            version=self.writer.version,
            publishes=counts.publishes,
            updates=counts.updates,
            bytes_copied=counts.bytes_copied,
            aborted=counts.aborted,
            reaped=counts.reaped,
            publish=counts.publish.latency(),
            pin_wait=counts.pin_wait.latency(),
            ack_wait=counts.ack_wait.latency(),
        )

    def _reap_dead(self) -> bool:
        """Free the rows of dead readers in the way; were there any?"""
        dead = [(index, owner) for index, owner, _ in self.writer.blockers() if not self.peers.alive(owner)]
        self.counts.reaped += sum(self.arena.control.reap(index, owner, self._me) for index, owner in dead)
        return bool(dead)

    def _refuse_own_pins(self) -> None:
        held = self.arena.rows_held_by_this_thread()
        if held and any(index in held for index, _, _ in self.writer.blockers()):
            raise ProtocolError(
                "this thread is inside a read section of the slot that the publish needs; leave the section first",
                version=self.next_version - 1,
            )

    def _stalled(self) -> ReaderStalled:
        control = self.arena.control
        missing = [_rows.name_of(control, (index, owner)) for index, owner, _ in self.writer.blockers()]
        return ReaderStalled(
            f"version {self.next_version} was not written: {_rows.listed(missing) or 'a reader'} still hold(s) the "
            "slot it needs; shorten their read sections, use more slots, or give more time with timeout=",
            version=self.next_version,
            missing=missing,
        )
