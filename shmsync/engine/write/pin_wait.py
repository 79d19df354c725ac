"""Wait until readers have left the slot that the next version needs: reap the dead, name those that stay.

A wait of the thread that holds the writer's lock ends when another thread calls close(): CloseRequest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ... import _native
from ...errors import ClosedError, ProtocolError, ReaderStalled
from ...memory.arena import Arena
from ...memory.process import Peers, ProcessState, pid_of, stay_if_exiting
from ...memory.segment import RowId
from ..deadlines import SLICE, slice_until
from ..outcome import listed

_log = logging.getLogger("shmsync")
_FIRST_SLICE = 0.001  # seconds
_LOOK_AT_STOPPED = 0.005  # seconds between two looks at a stopped process


class CloseRequest:
    """Hands the writer's lock from a thread that waits with it to the one that wants to close the arena."""

    def __init__(self, lock: _native.WriterLock) -> None:
        self._lock = lock
        self._requests: list[object] = []
        self._taken = False  # by the wait that is under way
        self.waiting_thread: int | None = None  # the holder of the lock, while it waits for readers or acks

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The calling thread, which holds the lock, waits for readers or acks in here and asks pending()."""
        self._taken = False
        self.waiting_thread = threading.get_ident()
        try:
            yield
        finally:
            self.waiting_thread = None

    def pending(self) -> bool:
        """In each slice of a wait: must it end, since another thread closes the arena?"""
        stay_if_exiting()
        if self._requests and not self._taken:
            with suppress(IndexError):  # close() has taken it back
                self._requests.pop()
                self._taken = True
        return self._taken

    @contextmanager
    def exclusive(self, deadline: float) -> Iterator[None]:
        """Hold the lock for close(), after the wait of another thread has ended; at most until the monotonic deadline.

        Raises WriterBusy as long as no wait has been ended: one that ended with ClosedError is followed by the close.
        """
        request = object()
        mine = self._lock.reserve(request)  # what a waiter gives up goes to close(), and not to a third thread
        try:
            if mine and self._others_wait():
                self._requests.append(request)
                while request in self._requests and self._others_wait() and time.monotonic() < deadline:
                    time.sleep(0.0005)
                try:
                    self._requests.remove(request)
                except ValueError:  # taken: that wait ends with ClosedError, so the close must follow
                    while self._lock.locked():
                        time.sleep(0.0005)
            self._lock.acquire(request)
            yield
        finally:
            if mine:
                self._requests.clear()
            self._lock.forgo(request)
            self._lock.release(request)

    def _others_wait(self) -> bool:
        return self._lock.locked() and self.waiting_thread not in (None, threading.get_ident())


class PinWait:
    """The writer's wait for a slot that no reader holds.

    Attributes:
        arena, writer, peers, me: what it was made with; the wait for acks uses them too.
        died: the rows of dead readers that were taken back since clear(), with their names.
        stalls: waits that ended at their deadline.
        reaped: rows taken back.
    """

    def __init__(
        self, arena: Arena, name: str, writer: _native.Writer, peers: Peers, owner: int, close_request: CloseRequest
    ) -> None:
        self.arena, self.writer, self.peers, self.me = arena, writer, peers, owner
        self._close_request = close_request
        self._name = name
        self.died: dict[RowId, int | str] = {}
        self.stalls = self.reaped = 0

    def until_free(self, deadline: float) -> bool:
        """Wait for a slot and begin to write it, or raise with nothing written; the caller undoes.

        False: a stopped process is in the only slot. It may never continue, and the gate keeps all other readers out.
        """
        writer = self.writer
        most = _FIRST_SLICE  # a reader that died before this wait holds it up no longer
        with self._close_request.waiting():
            while True:
                self._refuse_own_pins()
                free = writer.wait_begin(slice_until(deadline, most))
                most = min(2 * most, SLICE)
                stay_if_exiting()  # also in a slot that came free because the process exits
                if free:
                    return True
                self._end_if_closed()
                if not self._reap_dead() and time.monotonic() >= deadline:
                    self.stalls += 1
                    stalled = self._stalled()
                    _log.warning("arena %r: %s", self._name, stalled)
                    raise stalled
                if self._held_by_stopped():
                    return False

    def while_stopped(self, deadline: float) -> None:
        """Wait, with the gate open, until the stopped process goes on, leaves or dies; at most to the deadline."""
        with self._close_request.waiting():
            while self._held_by_stopped() and time.monotonic() < deadline:
                self._end_if_closed()
                time.sleep(_LOOK_AT_STOPPED)

    def _held_by_stopped(self) -> bool:
        stopped = ProcessState.STOPPED
        blockers = self.writer.blockers() if self.arena.slots == 1 else ()
        return any(self.peers.state(owner) is stopped for _, owner, _ in blockers)

    def _end_if_closed(self) -> None:
        if self._close_request.pending():
            raise ClosedError(
                f"arena {self._name!r} was closed by another thread; nothing was published, make a new Publisher"
            )

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
