"""What a reader has, its waits for versions, and its way to the arena of a publisher that was started again."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from typing import Any, Protocol

import torch

from ... import _native
from ..._native import Consistency, State
from ...errors import ClosedError, ProtocolError, PublishTimeout, ShmSyncError, WriterBusy, WriterDied
from ...memory.arena import Arena
from ...memory.attaching import Attached, Release
from ...memory.system.exiting import stay_if_exiting
from ...memory.system.process import Peers, pid_of
from ..deadlines import Samples, check_version, deadline_after, slice_until
from .device_sections import SectionStreams
from .successor import Successor

_log = logging.getLogger("shmsync")


def _reads(attached: Attached) -> _native.DeviceReads | None:
    place = attached.arena.on_device
    return None if place is None else place.reads


class Follower(Protocol):
    """Something that shows the weights and moves to each new version: a bound module, for example.

    It overrides what concerns it.
    """

    def prepare(self) -> None:
        """Called for all followers before any moves. What cannot show the next version raises."""
        return

    def move(self, slot: int) -> bool:
        """Show this slot, whose version the open section holds. False: drop this follower."""
        raise NotImplementedError

    def rebase(self, arena: Arena) -> None:
        """From the next move() on, show this arena. Its leaves are the same, its slots and addresses are not."""
        return

    def private_copies(self) -> list[torch.Tensor]:
        """Its tensors that a move copies into."""
        return []


class WaitPath(_native.Reader):
    """The state of a reader, and its waits for the publisher. Base of ReadPath, which has the sections."""

    def __init__(
        self,
        attached: Attached,
        release: Release,
        peers: Peers,
        consistency: Consistency,
        name: str,
        timeout: float,
        successor: Successor | None,
    ) -> None:
        super().__init__(attached.arena.control, attached.row, attached.owner, consistency, _reads(attached))
        begin, end = attached.arena.readonly_range()
        self.set_slab(begin, end)
        self.arena = attached.arena
        self.followers: list[Follower] = []
        self.covers: weakref.WeakSet[Any] = weakref.WeakSet()  # of bound modules
        self.streams = SectionStreams()
        self.optimistic = consistency is Consistency.OPTIMISTIC
        self.timeout = timeout  # default of waits, in seconds
        self._shown = attached.arena  # the arena of `weights`: until a successor's are applied, the old one's
        self._slot = 0
        self._moves = 0
        # The functions of on_version(), and the session and the version that each was called for.
        self._told: dict[Callable[[int], object], tuple[bytes, int] | None] = {}
        self._teller: int | None = None  # the thread that calls them now
        self._waits = Samples()
        self._writer_owner = attached.writer
        self._release = release
        self._peers = peers
        self.name = name  # the arena's
        self.look_also: Callable[[], None] | None = None  # raises what else ends the waits
        self._successor = successor
        self.follows = successor is not None
        self._restarts = 0
        self._finalizer = util.Finalize(self, release, exitpriority=30)
        self.arena.reader = weakref.ref(self)

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """As Subscriber.wait_version()."""
        self.check_open()
        if self.arena.slots == 1 and self.in_pinned_section and self.latest < version:
            raise ProtocolError(
                "wait_version() inside a read section with slots=1 would wait for a publisher that waits for it; "
                "leave the section first, or use more slots",
                version=version,
            )
        return self._wait_for(check_version(version), deadline_after(timeout, self.timeout))

    @property
    def held(self) -> tuple[int, int]:
        """The version and the slot of the open section."""
        return self.held_version, self.held_slot

    @property
    def gone(self) -> bool:
        """Will the publisher of this arena publish nothing more?"""
        return self.state == State.CLOSED or not self._peers.alive(self._writer_owner)

    @contextmanager
    def renewing_copies(self) -> Iterator[None]:
        """The private copies of bound modules are renewed inside; a later use calls use_copies() first."""
        with self.streams.renewing_copies():
            yield
        self.copies_pending = self.streams.pending

    def use_copies(self) -> None:
        """Order the current stream behind the renewal of private copies."""
        self.streams.use_copies()
        self.copies_pending = self.streams.pending

    def _look_up(self) -> None:
        """In each slice of a wait: can the version still arrive?"""
        stay_if_exiting()
        if self.closing_or_closed:
            raise ClosedError(f"this Subscriber of arena {self.name!r} was closed by another thread; attach again")
        if self.look_also is not None:
            self.look_also()

    def _move_to_successor(self) -> bool:
        """Move to the arena that has taken this one's place, if there is one. Hold the lock, outside of sections."""
        if self._successor is None or not self.gone:
            return False
        self.publisher_lost = True
        attached = self._successor.find(self.arena)
        if attached is None:
            return False
        self._release.add(attached)
        self.move_to_arena(attached.arena.control, attached.row, attached.owner, _reads(attached))
        self.set_slab(*attached.arena.readonly_range())
        self.arena.reader, attached.arena.reader = None, self.arena.reader
        self.arena = attached.arena
        self._writer_owner = attached.writer
        self._restarts += 1
        self.publisher_lost = False
        _log.info("arena %r: its publisher was started again, and is followed", self.name)
        return True

    def _wait_for(self, version: int, deadline: float, *, entering: bool = False) -> int:
        """Wait until `version` or a later one is published; the published one.

        `entering`: this thread enters a section of exactly this version, and holds the lock. Else no lock is held, and
        every version of a session that is newer than the calling thread's counts.
        """
        started, session = time.perf_counter(), self.used_session
        while True:
            if not entering and self.session != session:
                if self.has_used_version:
                    self.use_applied_version()
                return self.latest
            if self.wait_version_slice(version, slice_until(deadline)) and (latest := self.latest) >= version:
                return latest
            gone, closed = self.gone, self.state == State.CLOSED  # death first: then the state is final
            self._look_up()
            late = time.monotonic() >= deadline
            if gone:
                last = max(self.latest, self.final_version if self.arena.slots == 1 else 0)
                if last >= version:
                    return last
                if self._move_to_successor_in_wait(deadline, entering):
                    continue
                if self._successor is None or self.in_section or late:
                    raise self._none_will_come(version, closed)
                time.sleep(slice_until(deadline) / 1e9)
            elif late:
                raise PublishTimeout(
                    f"version {version} of arena {self.name!r} was not published within "
                    f"{time.perf_counter() - started:.3g} s, the newest is {self.latest}; see whether the trainer "
                    "still publishes, or give it more time with timeout=",
                    version=version,
                )

    def _move_to_successor_in_wait(self, deadline: float, entering: bool) -> bool:
        """Does the subscriber read another arena now? A section keeps the one that it has entered."""
        if entering:
            return self._move_to_successor()
        if self._successor is None or self.in_section:
            return False
        arena = self.arena
        try:
            with self.hold_lock(max(0.0, deadline - time.monotonic())):
                return self.arena is not arena or self._move_to_successor()
        except WriterBusy:  # another thread stays in its section: this wait is over at its deadline
            return False

    def _none_will_come(self, version: int, closed: bool) -> ShmSyncError:
        back = "" if self._successor is None else ", and was not published again in time"
        if closed:
            return ClosedError(
                f"arena {self.name!r} was closed at version {self.latest}{back}; version {version} will not come",
                version=version,
            )
        cure = "" if self.follows else ", or attach with follow=True, which moves to the new arena when there is one"
        return WriterDied(
            f"the publisher of arena {self.name!r} (pid {pid_of(self._writer_owner)}) died{back}; the newest "
            f"version is {self.latest}. Restart it and attach to the new arena{cure}",
            version=version,
        )
