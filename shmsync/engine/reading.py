"""Entering a read section when it is not the common case: something is new, somebody is in the way, or dead.

The common case is native (native/bind/reader.cpp), which calls the hooks here for all else.
"""

from __future__ import annotations

import time
from typing import Protocol

from torch import nn

from .. import _native
from ..errors import ClosedError, Poisoned, ProtocolError, PublishTimeout, WriterBusy, WriterDied
from ..memory.attaching import Attached
from ..memory.process import Peers, pid_of
from .stats import Samples
from .timing import check_version, deadline_after, slice_until

_SAME, _MOVED, _GATED, _POISONED, _EVICTED = range(5)  # Enter in native/include/shmsync/read_side.hpp
_CLOSED = 1  # State in layout.hpp


class Follower(Protocol):
    """Something that shows the weights, and moves with the version: a bound module, for example."""

    def move(self, slot: int) -> bool:
        """Show this slot, whose version is held. False: forget me."""

    def owners(self) -> set[nn.Module]:
        """The modules that it moves."""


class Pinned(float):
    """A timeout that also asks for a pinned section, whatever the subscriber's consistency."""


class ReadPath(_native.Reader):
    """The state that a read section moves, and how to enter one. Base of Subscriber."""

    def __init__(self, attached: Attached, peers: Peers, consistency: int, name: str, timeout: float) -> None:
        super().__init__(attached.arena.control, attached.row, attached.owner, consistency)
        begin, end = attached.arena.readonly_range()
        self._set_slab(begin, end)
        self._arena = attached.arena
        self._writer_owner = attached.writer
        self._peers = peers
        self._name = name
        self._timeout = timeout
        self._optimistic = consistency == 1
        self._bindings: list[Follower] = []
        self._version = 0
        self._slot = 0
        self._moves = 0
        self._waits = Samples()

    # Hooks that the native Reader calls, with its lock held. It drops the pin and the lock if they raise.

    def _enter_slow(self, outcome: int, version: int | None, timeout: float | None) -> None:
        """Enter, or raise."""
        started = time.perf_counter()
        deadline = deadline_after(timeout, self._timeout)
        pinned = isinstance(timeout, Pinned)
        if version is not None:
            version = check_version(version)
            self._wait_for(version, deadline)
        if version is not None or pinned:
            outcome = self._leave_if_entered(outcome, pinned)
        waited = False
        while outcome not in (_SAME, _MOVED):
            waited = True
            outcome = self._try_again(outcome, deadline, pinned)
        if version is not None and self._held >> 8 != version:
            raise ProtocolError(
                f"version {version} is gone, the arena is at {self._held >> 8}; read without version=, or make the "
                "publisher wait for acks",
                version=version,
            )
        if outcome == _MOVED:
            self._move()
        if waited:
            self._waits.add(time.perf_counter() - started)

    def _leave_if_entered(self, outcome: int, pinned: bool) -> int:
        """Start over with a pin; the native side may have entered in its own mode already."""
        if outcome in (_SAME, _MOVED):
            self._abandon()
        return self._try_enter(pinned)

    def _try_again(self, outcome: int, deadline: float, pinned: bool) -> int:
        if outcome == _POISONED:
            raise Poisoned(
                f"the publisher of arena {self._name!r} failed in the middle of version {self._latest + 1}; it has to "
                "publish() all weights again",
                version=self._latest + 1,
            )
        if outcome == _EVICTED:
            raise ProtocolError(
                f"this subscriber's row in arena {self._name!r} was taken away because it held garbage; attach again, "
                "and look for what writes beyond its memory"
            )
        # Death first, then the state, which nobody changes any more.
        if not self._peers.alive(self._writer_owner):
            outcome = self._enter_final()
            if outcome == _POISONED:
                raise Poisoned(
                    f"the publisher of arena {self._name!r} (pid {pid_of(self._writer_owner)}) died in the middle of "
                    f"version {self._latest + 1}, so the weights are half written; restart it",
                    version=self._latest + 1,
                )
            return outcome
        if time.monotonic() >= deadline:
            raise WriterBusy(
                f"the publisher of arena {self._name!r} kept readers out until the deadline; make its update() "
                "sections shorter, use slots=2, or give more time",
                version=self._latest,
            )
        self._wait(slice_until(deadline))
        return self._try_enter(pinned)

    def _move(self) -> None:
        """Make everything that shows the weights show the version that is held, then ack."""
        slot = self._held & 0x7F
        for binding in [b for b in self._bindings if not b.move(slot)]:
            self._bindings.remove(binding)  # its module is gone
        self._slot = slot
        self._version = self._held >> 8
        self._moves += 1
        self._applied()

    def _refresh_slow(self) -> bool:
        before = self._version
        outcome = self._try_enter(False)
        if outcome != _SAME:
            self._enter_slow(outcome, None, None)
        while self._abandon() and self._optimistic:  # torn while buffers were copied
            self._forget()
            self._enter_slow(_GATED, None, Pinned(self._timeout))
        return self._version != before

    def _wait_for(self, version: int, deadline: float) -> int:
        while True:
            if self._wait_version(version, slice_until(deadline)):
                return self._latest
            if self._state == _CLOSED:
                if self._latest >= version:
                    return self._latest
                raise ClosedError(
                    f"arena {self._name!r} was closed at version {self._latest}; version {version} will not come",
                    version=version,
                )
            if not self._peers.alive(self._writer_owner):
                last = max(self._latest, self._last_words if self._arena.slots == 1 else 0)
                if last >= version:
                    return last
                raise WriterDied(
                    f"the publisher of arena {self._name!r} (pid {pid_of(self._writer_owner)}) died; the newest "
                    f"version is {self._latest}. Restart it and attach to the new arena",
                    version=version,
                )
            if time.monotonic() >= deadline:
                raise PublishTimeout(
                    f"version {version} was not published in time, the newest is {self._latest}; is the trainer "
                    "slow or stuck?",
                    version=version,
                )
