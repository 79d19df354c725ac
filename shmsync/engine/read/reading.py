"""The reader behind a Subscriber: its sections, its waits, and its moves to new versions and to a restarted trainer.

A section shows one version from its entry to its exit. The common case is native (native/bind/reader.hpp): nothing new,
and the gate is open. It calls hooks here for all else.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import util
from typing import TYPE_CHECKING, Any, TypeVar

from ... import _native
from ..._native import Consistency, Enter, HostCall, State
from ...errors import (
    ArenaCorrupt,
    ClosedError,
    Poisoned,
    ProtocolError,
    PublishTimeout,
    ShmSyncError,
    WriterBusy,
    WriterDied,
)
from ...memory.attaching import Attached, Release
from ...memory.devices import Stream
from ...memory.manifest import Key
from ...memory.process import Peers, pid_of, stay_if_exiting
from ...memory.segment import Handle
from ..deadlines import Samples, check_timeout, check_version, deadline_after, slice_until
from ..stats import SubscriberStats
from .device_sections import end_reads, wait_for_reads
from .outputs import private
from .successor import Successor

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

T = TypeVar("T")

_log = logging.getLogger("shmsync")

_TEARS_BEFORE_PIN = 3
_SAME, _MOVED = Enter.SAME, Enter.MOVED  # which an Enum finds in 0.1 µs


class ReadPath(_native.Reader):
    """The reader behind a Subscriber: what a read section moves, and how to enter one."""

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
        self.arena = attached.arena
        self.followers: list[Any] = []  # the Bindings of modules, which move to each version
        self._update_memory()
        self.covers: weakref.WeakSet[Any] = weakref.WeakSet()  # of bound modules
        self._streams: list[Stream] = []  # that the open section uses on a device, besides the current one
        self.optimistic = consistency is Consistency.OPTIMISTIC
        self.timeout = timeout  # default of waits, in seconds
        self._closing = 0  # threads in close(): the waits of others end
        self._shown = attached.arena  # the arena of `weights`: until a successor's are applied, the old one's
        # The functions of on_version(), and the session and the version that each was called for.
        self._told: dict[Callable[[int], object], tuple[bytes, int] | None] = {}
        self._teller: int | None = None  # the thread that calls them now
        self._waits = Samples()
        self.writer = attached.writer
        self._release = release
        self._peers = peers
        self.name = name  # the arena's
        self.left: Callable[[], bool] = lambda: False  # has the trainer left the Workers of which this is one?
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
            self._check_wait()
            late = time.monotonic() >= deadline
            if gone:
                last = max(self.latest, self.final_version if self.arena.slots == 1 else 0)
                if last >= version:
                    return last
                if self._moved_on(deadline, entering):
                    continue
                if not self.follows or self.in_section or late:
                    raise self._none_will_come(version, closed)
                time.sleep(slice_until(deadline) / 1e9)
            elif late:
                raise PublishTimeout(
                    f"version {version} of arena {self.name!r} was not published within "
                    f"{time.perf_counter() - started:.3g} s, the newest is {self.latest}; see whether the trainer "
                    "still publishes, or give it more time with timeout=",
                    version=version,
                )

    def _moved_on(self, deadline: float, entering: bool) -> bool:
        """Does the subscriber read another arena now? A section keeps the one that it has entered."""
        if entering:
            return self._move_to_successor()
        if not self.follows or self.in_section:
            return False
        arena = self.arena
        try:
            with self.hold_lock(max(0.0, deadline - time.monotonic())):
                return self.arena is not arena or self._move_to_successor()
        except WriterBusy:  # another thread stays in its section: this wait is over at its deadline
            return False

    def _none_will_come(self, version: int, closed: bool) -> ShmSyncError:
        back = ", and was not published again in time" if self.follows else ""
        if closed:
            return ClosedError(
                f"arena {self.name!r} was closed at version {self.latest}{back}; version {version} will not come",
                version=version,
            )
        cure = "" if self.follows else ", or attach with follow=True, which moves to the new arena when there is one"
        return WriterDied(
            f"the publisher of arena {self.name!r} (pid {pid_of(self.writer)}) died{back}; the newest "
            f"version is {self.latest}. Restart it and attach to the new arena{cure}",
            version=version,
        )

    def add_follower(self, follower: Any) -> None:
        """Move it with each version, from the next one on. Its private copies change as the slab does."""
        self.followers.append(follower)
        self._update_memory()

    def _update_memory(self) -> None:
        copies = [span for follower in self.followers for span in follower.private_ranges()]
        self.set_memory([self.arena.readonly_range(), *copies])

    @property
    def gone(self) -> bool:
        """Will the publisher of this arena publish nothing more?"""
        return self.state == State.CLOSED or not self._peers.alive(self.writer)

    def _check_wait(self) -> None:
        """In each slice of a wait: can the version still arrive?"""
        stay_if_exiting()
        if self._closing or self.closed:
            raise ClosedError(f"this Subscriber of arena {self.name!r} was closed by another thread; attach again")
        if self.left():
            raise ClosedError(f"the trainer has left the Workers of arena {self.name!r}; let this worker return")

    def _move_to_successor(self) -> bool:
        """Move to the arena that has taken this one's place, if there is one. Hold the lock, outside of sections."""
        if self._successor is None or not self.gone:
            return False
        self.publisher_lost = True
        attached = self._successor.find(self.arena)
        if attached is None:
            return False
        self._release.add(attached)
        self.moves_natively = False
        self.move_to_arena(attached.arena.control, attached.row, attached.owner, _reads(attached))
        self.arena.reader, attached.arena.reader = None, self.arena.reader
        before, self.arena = self.arena, attached.arena
        self._update_memory()
        if before.live is not None:
            self.arena.live = before.live[0], (Handle(self.name, self.arena.session),)
        self.writer = attached.writer
        self._restarts += 1
        self.publisher_lost = False
        _log.info("arena %r: its publisher was started again, and is followed", self.name)
        return True

    @property
    def weights(self) -> TensorDictBase:
        """As Subscriber.weights."""
        self.check_open()
        return self._shown.weights(self.shown_slot)

    @property
    def tensors(self) -> dict[Key, torch.Tensor]:
        """The leaves of `weights` by key."""
        self.check_open()
        return self._shown.views(self.shown_slot)

    def stats(self) -> SubscriberStats:
        """As Subscriber.stats()."""
        applied, latest = self.applied_version, self.latest
        return SubscriberStats(
            applied, latest, max(0, latest - applied), *self.section_counts, self.moves, self._waits.latency(),
            self._restarts,
        )  # fmt: skip

    def run(self, fn: Callable[..., T], *args: Any) -> tuple[T, int]:
        """What fn(*args) gives in one section that is not torn, views of the weights included, and its version."""
        if self._teller is not None and self._teller == threading.get_ident():  # in a function of on_version()
            return fn(*args), self.held_version
        if not self.optimistic or self.in_section:
            with self.read() as section:
                return fn(*args), section.version
        for _ in range(_TEARS_BEFORE_PIN):
            section = self.read()
            try:
                with section:
                    result = fn(*args)
            except Exception:
                if not section.torn:
                    raise
            else:
                if not section.torn:
                    return result, section.version
            self.count_retry()
        with self.pinned_section() as section:
            return fn(*args), section.version

    def private(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What fn(*args, **kwargs) gives, made fit to outlive the section that this is called in."""
        return private(fn(*args, **kwargs), self.aliases, (*args, *kwargs.values()))

    def on_version(self, fn: Callable[[int], object]) -> None:
        """As Subscriber.on_version()."""
        self.check_open()
        with self.hold_lock():
            self._told[fn] = None
            self.moves_natively = False
            if not self.has_used_version:
                self.forget_applied()  # attaching has applied it, and its first section is still to come

    def _tell(self) -> None:
        """Call the functions of on_version(): each of them, though another one raises."""
        at = self.session, self.held_version

        def call_all() -> None:
            with ExitStack() as calls:
                for fn in [fn for fn, told in reversed(self._told.items()) if told != at]:
                    self._told[fn] = at
                    calls.callback(fn, self.held_version)

        inner: Callable[..., Any] = call_all
        args: tuple[Any, ...] = ()
        for cover in [cover for cover in self.covers if cover.path is self]:  # bound modules can be called in there
            inner, args = cover.run_inside, (inner, args, {})
        self._teller = threading.get_ident()
        try:
            inner(*args)
        finally:
            self._teller = None

    def close(self) -> None:
        """As Subscriber.close()."""
        if self.closed or self.in_parent:  # forked: the row is the parent's
            return
        if self.in_section:
            raise ProtocolError("close() inside a read section of this Subscriber; leave the section first")
        self._closing += 1
        try:
            with suppress(ClosedError), self.hold_lock():  # another thread may be quicker
                wait_for_reads(self.arena, self.name, deadline_after(None, self.timeout))
                self.retire()
                try:
                    self.followers.clear()
                finally:
                    self._finalizer()
        finally:
            self._closing -= 1

    def __del__(self) -> None:
        if getattr(self, "_finalizer", None) is not None and not self.closed and not self.in_parent:
            warnings.warn(f"Subscriber of {self.name!r} was not closed", ResourceWarning, stacklevel=2)

    # Hooks that the native Reader calls, with its lock held. It drops the pin and the lock if they raise. They may run
    # below compiled code, and Dynamo must not compile them: bind/compiled.py tells it.

    def _enter_slowly(self, outcome: Enter, version: int | None, timeout: float | None, pinned: bool) -> None:
        """Enter a section, or raise; waits while the gate is closed."""
        started = time.perf_counter()
        deadline = deadline_after(timeout, self.timeout)
        pinned = pinned or bool(self._told)  # what on_version() calls sees no torn weights
        if version is not None:
            version = check_version(version)
            self._wait_for(version, deadline, entering=True)
        if version is not None or pinned:
            if outcome in (_SAME, _MOVED):  # leave what the native side has entered
                self.leave_held()
            outcome = self.try_enter(pinned)
        waited = False
        while outcome not in (_SAME, _MOVED):
            waited = True
            outcome = self._try_again(outcome, deadline, pinned)
        if version is not None and self.held_version != version:
            raise ProtocolError(
                f"version {version} is gone, the arena is at {self.held_version}; read without version=, or make the "
                "publisher wait for acks",
                version=version,
            )
        if outcome is _MOVED:
            self._move()
        if waited:
            self._waits.add(time.perf_counter() - started)

    def _try_again(self, outcome: Enter, deadline: float, pinned: bool) -> Enter:
        """One slice of the wait: for the gate, and for the repair of a poisoned arena as long as it can come."""
        self._check_wait()
        if outcome == Enter.EVICTED:
            raise ProtocolError(
                f"this subscriber's row in arena {self.name!r} was taken away because it held garbage; attach again, "
                "and look for what writes beyond its memory"
            )
        if outcome == Enter.CORRUPT:
            raise ArenaCorrupt(
                f"arena {self.name!r} says that its newest version lies in slot {self.latest_slot} but it has "
                f"{self.arena.slots} slots; something wrote into its control segment, restart its publisher"
            )
        if self._move_to_successor():
            return self.try_enter(pinned)
        late = time.monotonic() >= deadline
        hopeless = late or self._successor is None  # else the publisher may be started again
        if outcome == Enter.POISONED:
            if late or (hopeless and self.gone):
                raise Poisoned(
                    f"the publisher of arena {self.name!r} failed in the middle of version {self.latest + 1}; it has "
                    "to publish() or send() all weights again",
                    version=self.latest + 1,
                )
        elif not self._peers.alive(self.writer):  # death first: then the state is final
            outcome = self.enter_after_death()  # its last whole version is served, a half written one never is
            if outcome != Enter.POISONED:
                return outcome
            if hopeless:
                raise Poisoned(
                    f"the publisher of arena {self.name!r} (pid {pid_of(self.writer)}) died in the middle of "
                    f"version {self.latest + 1}, so the weights are half written; restart it",
                    version=self.latest + 1,
                )
        elif late:
            raise WriterBusy(
                f"the publisher of arena {self.name!r} kept readers out until the deadline; make its update() "
                "sections shorter, use slots=2, or give more time",
                version=self.latest,
            )
        self.wait_at_gate(slice_until(deadline))
        self._check_wait()
        return self.try_enter(pinned)

    def _move(self) -> None:
        """Move all followers to the held version, then ack it."""
        slot, arena, followers = self.held_slot, self.arena, self.followers
        self.moves_natively = False
        other_arena = self._shown is not arena
        if other_arena:
            for follower in followers:
                follower.rebase(arena)
        for follower in followers:
            follower.prepare()
        gone = None
        for follower in followers:
            if not follower.move(slot):
                gone = follower
        if gone is not None:
            followers.remove(gone)  # its module is gone; of several, the next version removes another one
        if followers:
            _native.clear_caches()
        self.shown_slot, self._shown = slot, arena
        self.moves += 1
        self.moves_natively = not (self._told or self.optimistic or arena.device_slab)
        try:
            if self._told:
                self._tell()
        finally:
            self.ack_held()
            if other_arena:
                self._release.keep_last()

    def _release_after(self, stream: object) -> None:
        if self.arena.device_slab is not None:
            self._streams.append(self.arena.device_slab.device.as_stream(stream))  # TypeError for what is none

    def _reads_end(self, call: HostCall | None) -> None:
        end_reads(self.arena, self.name, self._streams, call, self._check_wait)

    def _checked_timeout(self, timeout: float) -> float:
        return check_timeout(timeout)

    def _refresh_now(self) -> bool:
        if self._successor is not None:
            self._move_to_successor()
        before = self.moves
        outcome = self.try_enter(bool(self._told))
        if outcome is _MOVED:
            self._move()
        elif outcome is not _SAME:
            self._enter_slowly(outcome, None, None, False)
        while self.leave_held() and self.optimistic:  # torn while buffers were copied
            self.forget_applied()
            self._enter_slowly(Enter.GATED, None, None, True)
        return self.moves != before

    def _look_for_successor(self) -> None:
        """At the entry of a section now and then: move on if the publisher was started again."""
        try:
            self._move_to_successor()
        except ShmSyncError as error:
            assert self._successor is not None
            self._successor.warn(error)


def _reads(attached: Attached) -> _native.DeviceReads | None:
    place = attached.arena.device_slab
    return None if place is None else place.reads
