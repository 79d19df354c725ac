"""The slot that the next version goes into: get it from its readers, bring it up to date, then commit or take it back.

In an arena on a device the copies are done later, and the device commits behind them (device_writes.py). So it is in
the host's memory too, once a GPU that had a source has pinned the slab.
"""

from __future__ import annotations

import logging
import time

from ... import _native
from ...errors import ClosedError, DeviceFailed, ProtocolError, ReaderStalled
from ...memory.arena import Arena
from ...memory.devices import DeviceSlab
from ...memory.process import Peers, ProcessState, me, pid_of, stay_if_exiting
from ...memory.segment import RowId
from ..deadlines import SLICE, slice_until
from ..outcome import listed
from ..stats import Counts
from .copy_plan import DirtyLeaves
from .device_writes import DeviceWrites

_log = logging.getLogger("shmsync")
_FIRST_SLICE = 0.001  # seconds
_LOOK_AT_STOPPED = 0.005  # seconds between two looks at a stopped process


class SlotWriter:
    """Writes the slots of one arena, one version at a time.

    Args:
        arena, name: whose slots.

    Attributes:
        native: the writer's side of the protocol. While a version is under way on a `device`, it is the device's.
        device: commits the versions, behind its copies. None: this process does, as long as no source was on a GPU.
        addresses: of the slots.
        touched: may the write that is under way have changed a byte?
        died: the rows of dead readers that were taken back since this write began, with their names.
        closing: threads that wait to close the arena; that ends the waits of others.
    """

    def __init__(self, arena: Arena, name: str) -> None:
        self.arena, self.name, self.me = arena, name, me().owner
        self.peers, self.counts = Peers(), Counts()
        self.native = _native.Writer(arena.control, self.me, arena.device_slab is not None)
        self.device_writes: DeviceWrites | None = None
        if arena.device_slab is not None:
            self.commit_by(arena.device_slab)
        self.addresses = [arena.slot_address(slot) for slot in range(arena.slots)]
        self.touched = True
        self.died: dict[RowId, int | str] = {}
        self.closing = 0
        self._dirty = DirtyLeaves(arena.manifest, arena.slots)

    def commit_by(self, place: DeviceSlab) -> None:
        """Let the device of this place commit from now on."""
        self.device_writes = DeviceWrites(place, self.arena.manifest, self.name, self.native)

    def begin(self, deadline: float, version: int | None = None) -> None:
        """Get a slot to write, or raise with nothing written; the caller undoes. `version`: this one, not the next.

        The gate does not stay closed for a process that is stopped: it is opened until that goes on, so that other
        readers go on with the old version. A reader that runs is waited for with the gate closed, since it leaves its
        section soon.
        """
        self.touched = False
        self.died.clear()
        started = 0.0
        while True:
            if version is not None and version != self.native.next_version and not self.native.skip_to(version):
                raise ProtocolError(
                    f"the next version can be {self.native.next_version} or later, not {version}; versions only grow",
                    version=version,
                )
            if self.device_writes is not None:
                self.device_writes.ready(deadline)
            if self.native.begin():
                break
            started = started or time.perf_counter()
            if self._wait_until_free(deadline):
                break
            self.native.abort()
            self._wait_while_stopped(deadline)
        if started:
            self.counts.pin_wait.add(time.perf_counter() - started)

    def carry(self, given: frozenset[int] | None) -> None:
        """Bring the slot to write up to date, but for the leaves at these offsets, which are written next.

        None: any leaf may be written, and all have their current values before.
        """
        to, source = self.addresses[self.native.slot], self.addresses[self.native.current_slot]
        pieces = self._dirty.begin(self.native.slot, given)
        if pieces:
            table = [(to + offset, source + offset, size) for offset, size in pieces]
            if self.device_writes is None or self.arena.device_slab is None:
                _native.copy(table)
            else:
                self.device_writes.carry(table)
            self.counts.bytes_copied += sum(size for _, _, size in table)

    def commit(self) -> int:
        """Publish what was written; the new version. With a device: when it is written."""
        if self.device_writes is not None:
            return self.device_writes.commit()
        version = int(self.native.commit())
        self._dirty.written()
        return version

    def wait_until_published(self, deadline: float) -> None:
        """With a device: wait until the version that is under way is published. Raises DeviceBusy, DeviceFailed."""
        if self.device_writes is None:
            return
        try:
            if self.device_writes.wait_until_published(deadline):
                self._dirty.written()
        except DeviceFailed:
            self.undo()
            raise

    def undo(self) -> None:
        """Take a failed write back: the arena is as before, or poisoned if its only slot may be half written."""
        self.counts.aborted += 1
        if self.device_writes is not None:
            self.device_writes.take_back()
        if self.arena.slots == 1 and self.native.writing and self.touched:
            self.native.poison()
        else:
            self.native.abort()

    # ---- readers in the way

    def _wait_until_free(self, deadline: float) -> bool:
        """Wait for a slot and begin to write it, or raise with nothing written.

        False: a stopped process is in the only slot. It may never continue, and the gate keeps all other readers out.
        """
        most = _FIRST_SLICE  # a reader that died before this wait holds it up no longer
        while True:
            free = self.native.wait_begin(slice_until(deadline, most))
            most = min(2 * most, SLICE)
            self._check_wait()  # also in a slot that came free because the process exits
            if free:
                return True
            if not self._reap_dead() and time.monotonic() >= deadline:
                self.counts.stalls += 1
                stalled = self._stalled()
                _log.warning("arena %r: %s", self.name, stalled)
                raise stalled
            if self._held_by_stopped():
                return False

    def _wait_while_stopped(self, deadline: float) -> None:
        """Wait, with the gate open, until the stopped process goes on, leaves or dies; at most to the deadline."""
        while self._held_by_stopped() and time.monotonic() < deadline:
            self._check_wait()
            time.sleep(_LOOK_AT_STOPPED)

    def _check_wait(self) -> None:
        stay_if_exiting()
        if self.closing:
            raise ClosedError(f"arena {self.name!r} was closed by another thread; nothing was published")

    def _held_by_stopped(self) -> bool:
        stopped = ProcessState.STOPPED
        blockers = self.native.blockers() if self.arena.slots == 1 else ()
        return any(self.peers.state(owner) is stopped for _, owner, _ in blockers)

    def _reap_dead(self) -> bool:
        """Free the rows of dead readers in the way; were there any?"""
        control = self.arena.control
        dead = [(number, owner) for number, owner, _ in self.native.blockers() if not self.peers.alive(owner)]
        for row in dead:
            name = control.name_of(row)
            # Owner 0 is no death: the row was given back between two looks, or its words are garbage.
            if control.reap(*row, self.me) and row[1] != 0:
                self.died[row] = name
                self.counts.reaped += 1
                _log.info("arena %r: reader %s died in a section; its row was taken back", self.name, name)
        return bool(dead)

    def _stalled(self) -> ReaderStalled:
        names: list[int | str] = []
        holders: list[str] = []
        for number, owner, _ in self.native.blockers():
            name = self.arena.control.name_of((number, owner))
            pid = f" (pid {pid_of(owner)})" if isinstance(name, int) else ""
            mine = ", this process" if owner == self.me else ""
            stopped = ", which is stopped" if self.peers.state(owner) is ProcessState.STOPPED else ""
            names.append(name)
            holders.append(f"{listed([name])}{pid}{mine}{stopped}")
        version = int(self.native.next_version)
        return ReaderStalled(
            f"version {version} was not written: the slot it needs is held by {', '.join(holders) or 'a reader'}; "
            "shorten the read sections, use more slots, or give more time with timeout=",
            version=version,
            missing=names,
        )
