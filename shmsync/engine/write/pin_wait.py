"""Wait until readers have left the slot that the next version needs: reap the dead, name those that stay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ... import _native
from ...errors import ProtocolError, ReaderStalled
from ...memory.arena import Arena
from ...memory.process import Peers, ProcessState, pid_of
from ...memory.segment import RowId
from ..deadlines import SLICE, slice_until
from ..outcome import listed

_log = logging.getLogger("shmsync")
_FIRST_SLICE = 0.001  # seconds
_LOOK_AT_STOPPED = 0.005  # seconds between two looks at a stopped process


class PinWait:
    """The writer's wait for a slot that no reader holds.

    Attributes:
        arena, writer, peers, me: what it was made with; the wait for acks uses them too.
        died: the rows of dead readers that were taken back since clear(), with their names.
        stalls: waits that ended at their deadline.
        reaped: rows taken back.
    """

    def __init__(self, arena: Arena, name: str, writer: _native.Writer, peers: Peers, owner: int) -> None:
        self.arena, self.writer, self.peers, self.me = arena, writer, peers, owner
        self._name = name
        self.died: dict[RowId, int | str] = {}
        self.stalls = self.reaped = 0

    def until_free(self, deadline: float, check: Callable[[], None]) -> bool:
        """Wait for a slot and begin to write it, or raise with nothing written; the caller undoes.

        `check`: called in each slice. Raises what ends the wait: the process exits, another thread closes the arena.
        False: a stopped process is in the only slot. It may never continue, and the gate keeps all other readers out.
        """
        writer = self.writer
        most = _FIRST_SLICE  # a reader that died before this wait holds it up no longer
        while True:
            self._refuse_own_pins()
            free = writer.wait_begin(slice_until(deadline, most))
            most = min(2 * most, SLICE)
            check()  # also in a slot that came free because the process exits
            if free:
                return True
            if not self._reap_dead() and time.monotonic() >= deadline:
                self.stalls += 1
                stalled = self._stalled()
                _log.warning("arena %r: %s", self._name, stalled)
                raise stalled
            if self._held_by_stopped():
                return False

    def while_stopped(self, deadline: float, check: Callable[[], None]) -> None:
        """Wait, with the gate open, until the stopped process goes on, leaves or dies; at most to the deadline."""
        while self._held_by_stopped() and time.monotonic() < deadline:
            check()
            time.sleep(_LOOK_AT_STOPPED)

    def _held_by_stopped(self) -> bool:
        stopped = ProcessState.STOPPED
        blockers = self.writer.blockers() if self.arena.slots == 1 else ()
        return any(self.peers.state(owner) is stopped for _, owner, _ in blockers)

    def _reap_dead(self) -> bool:
        """Free the rows of dead readers in the way; were there any?"""
        control = self.arena.control
        dead = [(number, owner) for number, owner, _ in self.writer.blockers() if not self.peers.alive(owner)]
        for row in dead:
            name = control.name_of(row)
            # Owner 0 is no death: the row was given back between two looks, or its words are garbage.
            if control.reap(*row, self.me) and row[1] != 0:
                self.died[row] = name
                self.reaped += 1
                _log.info("arena %r: reader %s died in a section; its row was taken back", self._name, name)
        return bool(dead)

    def _refuse_own_pins(self) -> None:
        held = self.arena.rows_held_by_this_thread()
        if held and any(index in held for index, _, _ in self.writer.blockers()):
            raise ProtocolError(
                "this thread is inside a read section of the slot that the publish needs; leave the section first",
                version=int(self.writer.version),
            )

    def _stalled(self) -> ReaderStalled:
        names: list[int | str] = []
        holders: list[str] = []
        for number, owner, _ in self.writer.blockers():
            name = self.arena.control.name_of((number, owner))
            pid = f" (pid {pid_of(owner)})" if isinstance(name, int) else ""
            stopped = ", which is stopped" if self.peers.state(owner) is ProcessState.STOPPED else ""
            names.append(name)
            holders.append(f"{listed([name])}{pid}{stopped}")
        version = int(self.writer.next_version)
        return ReaderStalled(
            f"version {version} was not written: the slot it needs is held by {', '.join(holders) or 'a reader'}; "
            "shorten the read sections, use more slots, or give more time with timeout=",
            version=version,
            missing=names,
        )
