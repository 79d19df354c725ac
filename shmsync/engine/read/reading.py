"""Read sections, as far as they are Python: each shows one version from its entry to its exit.

The common case is native (native/bind/reader.hpp): nothing new, and the gate is open. It calls hooks here for all
else.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ... import _native
from ..._native import Enter, HostCall
from ...errors import ArenaCorrupt, ClosedError, Poisoned, ProtocolError, ShmSyncError, WriterBusy
from ...memory.dynamo import disable, skip
from ...memory.system.process import pid_of
from ..deadlines import check_timeout, check_version, deadline_after, slice_until
from ..stats import SubscriberStats
from .device_sections import wait_for_reads
from .outputs import private
from .waiting import WaitPath

if TYPE_CHECKING:
    from tensordict import TensorDictBase

T = TypeVar("T")

_TEARS_BEFORE_PIN = 3

with suppress(ImportError):  # this torch does not say
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    _native.tell_of_compiling(get_eval_frame_callback)


class Pinned(float):
    """A timeout that also asks for a pinned section, whatever the subscriber's consistency."""


class ReadPath(WaitPath):
    """The reader behind a Subscriber: what a read section moves, and how to enter one."""

    @property
    def weights(self) -> TensorDictBase:
        """As Subscriber.weights."""
        self.check_open()
        return self._shown.weights(self._slot)

    @property
    def lag(self) -> int:
        """As Subscriber.lag."""
        return max(0, self.latest - self.applied_version)

    def stats(self) -> SubscriberStats:
        """As Subscriber.stats()."""
        reads, torn, retries = self.section_counts
        return SubscriberStats(
            self.applied_version, self.latest, self.lag, reads, torn, retries, self._moves, self._waits.latency(),
            self._restarts,
        )  # fmt: skip

    @skip
    def run(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[T, int]:
        """As Subscriber.run(), with the version."""
        return self._computed(self._private, (fn, args, kwargs), {})

    @skip
    def _private(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return private(fn(*args, **kwargs), self.aliases, (*args, *kwargs.values()))

    @skip
    def run_as_is(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """As run(), but the result may show the weights."""
        return self._computed(fn, args, kwargs)[0]

    @skip
    def _computed(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[T, int]:
        """The result, and the version that it was computed with."""
        if self._teller is not None and self._teller == threading.get_ident():  # in a function of on_version()
            return fn(*args, **kwargs), self.held_version
        if not self.optimistic or self.in_section:
            with self.read() as section:
                return fn(*args, **kwargs), section.version
        for _ in range(_TEARS_BEFORE_PIN):
            section = self.read()
            try:
                with section:
                    result = fn(*args, **kwargs)
            except Exception:
                if not section.torn:
                    raise
            else:
                if not section.torn:
                    return result, section.version
            self.count_retry()
        return self.pinned(fn, *args, **kwargs)

    @skip
    def pinned(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> tuple[T, int]:
        """The result and its version, computed once, in a section that is not torn."""
        with self.hold_lock():
            if self.optimistic and not self.in_section:
                self.forget_applied()  # so that entering takes the slow path, which knows about Pinned
            with self.read(timeout=Pinned(self.timeout)) as section:
                return fn(*args, **kwargs), section.version

    def on_version(self, fn: Callable[[int], object]) -> None:
        """As Subscriber.on_version()."""
        self.check_open()
        with self.hold_lock():
            self._told[fn] = None
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
        try:
            with self.hold_lock_to_close():
                wait_for_reads(self.arena, self.name, deadline_after(None, self.timeout))
                self.retire()
                try:
                    self.followers.clear()
                finally:
                    self._finalizer()
        except ClosedError:
            pass  # another thread was quicker

    def __del__(self) -> None:
        if getattr(self, "_finalizer", None) is not None and not self.closed and not self.in_parent:
            warnings.warn(f"Subscriber of {self.name!r} was not closed", ResourceWarning, stacklevel=2)

    # Hooks that the native Reader calls, with its lock held. It drops the pin and the lock if they raise. They may run
    # below compiled code, and Dynamo must not compile them.

    def _enter_slowly(self, outcome: Enter, version: int | None, timeout: float | None) -> None:
        """Enter a section, or raise; waits while the gate is closed."""
        started = time.perf_counter()
        deadline = deadline_after(timeout, self.timeout)
        pinned = isinstance(timeout, Pinned) or bool(self._told)  # what on_version() calls sees no torn weights
        if version is not None:
            version = check_version(version)
            self._wait_for(version, deadline, entering=True)
        if version is not None or pinned:
            if outcome in (Enter.SAME, Enter.MOVED):  # leave what the native side has entered
                self.leave_held()
            outcome = self.try_enter(pinned)
        waited = False
        while outcome not in (Enter.SAME, Enter.MOVED):
            waited = True
            outcome = self._try_again(outcome, deadline, pinned)
        if version is not None and self.held_version != version:
            raise ProtocolError(
                f"version {version} is gone, the arena is at {self.held_version}; read without version=, or make the "
                "publisher wait for acks",
                version=version,
            )
        if outcome == Enter.MOVED:
            self._move()
        if waited:
            self._waits.add(time.perf_counter() - started)

    def _try_again(self, outcome: Enter, deadline: float, pinned: bool) -> Enter:
        """One slice of the wait: for the gate, and for the repair of a poisoned arena as long as it can come."""
        self._look_up()
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
                    "to publish() all weights again",
                    version=self.latest + 1,
                )
        elif not self._peers.alive(self._writer_owner):  # death first: then the state is final
            outcome = self.enter_after_death()
            if outcome != Enter.POISONED:
                return outcome
            if hopeless:
                raise Poisoned(
                    f"the publisher of arena {self.name!r} (pid {pid_of(self._writer_owner)}) died in the middle of "
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
        self._look_up()
        return self.try_enter(pinned)

    def _move(self) -> None:
        """Move all followers to the held version, then ack it."""
        slot = self.held_slot
        if self._shown is not self.arena:
            for follower in self.followers:
                follower.rebase(self.arena)
            self.order_copies(tensor for each in self.followers for tensor in each.private_copies())
        for follower in self.followers:
            follower.prepare()
        gone = []
        for follower in self.followers:
            if not follower.move(slot):
                gone.append(follower)
        for follower in gone:
            self.followers.remove(follower)  # its module is gone
        self._slot = slot
        self._moves += 1
        earlier, self._shown = self._shown, self.arena
        try:
            if self._told:
                self._tell()
        finally:
            self.ack_held()
            if self._shown is not earlier:
                self._release.keep_last()

    def _release_after(self, stream: object) -> None:
        self.streams.add(stream, self.arena)

    def order_copies(self, copies: Iterable[torch.Tensor]) -> None:
        """From now on these are the private copies of all bound modules."""
        self.streams.order_copies(copies, self.arena)
        self.copies_apart = bool(self.streams.apart)

    _use_copies = disable(WaitPath.use_copies)

    @disable
    def _copies_read(self) -> None:
        self.streams.end_copies(self.arena)

    @disable
    def _reads_end(self, call: HostCall | None) -> None:
        self.streams.end(self.arena, self.name, call, self._look_up)

    _enter_slow = disable(_enter_slowly)

    @disable
    def _checked_timeout(self, timeout: float) -> float:
        return check_timeout(timeout)

    def _refresh_now(self) -> bool:
        if self._successor is not None:
            self._move_to_successor()
        before = self._moves
        outcome = self.try_enter(bool(self._told))
        if outcome == Enter.MOVED:
            self._move()
        elif outcome != Enter.SAME:
            self._enter_slowly(outcome, None, None)
        while self.leave_held() and self.optimistic:  # torn while buffers were copied
            self.forget_applied()
            self._enter_slowly(Enter.GATED, None, Pinned(self.timeout))
        return self._moves != before

    _refresh_slow = disable(_refresh_now)

    @disable
    def _look_for_successor(self) -> None:
        """At the entry of a section now and then: move on if the publisher was started again."""
        try:
            self._move_to_successor()
        except ShmSyncError as error:
            assert self._successor is not None
            self._successor.warn(error)
