"""Who a process is, and whether it still lives.

Identity is pid + start ticks (field 22 of /proc/<pid>/stat) + boot id: a pid alone is reused, and creation times
computed from the wall clock move with it. Liveness is a pidfd: open it, then compare the ticks, then poll it.
Never the state letter of /proc/<pid>/stat: a process whose leader exited shows Z while its threads run on.
"""

from __future__ import annotations

import os
import select
import threading
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from .. import _native

_TICKS_MASK = (1 << 42) - 1


class ProcessState(str, Enum):
    """What a peer process is doing."""

    LIVE = "live"
    STOPPED = "stopped"
    DEAD = "dead"


class Identity(NamedTuple):
    """This process, as it signs what it owns."""

    owner: int  # pid << 42 | start ticks
    boot_id: bytes
    pid_namespace: int


def _stat_fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read().decode("utf-8", "replace")
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; raises OSError when it is gone."""
    return int(_stat_fields(pid)[19]) & _TICKS_MASK


@lru_cache(maxsize=4)
def _identity(pid: int, forks: int) -> Identity:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
    owner = _native.pack_owner(pid, start_ticks(pid))
    return Identity(owner, boot_id, os.stat("/proc/self/ns/pid").st_ino)


def me() -> Identity:
    """Identity of the calling process; right after a fork too."""
    return _identity(os.getpid(), _native.fork_generation())  # a grandchild may get an ancestor's pid again


def pid_of(owner: int) -> int:
    """The pid in an owner word."""
    return owner >> 42


class Peers:
    """Liveness of other processes; keeps one pidfd for each, so that asking again costs one poll. Thread-safe."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._lock = threading.RLock()  # a finaliser may close in the middle of a question

    def alive(self, owner: int) -> bool:
        """Does the process behind this owner word still run? A stopped one does."""
        with self._lock:
            return self._alive(owner)

    def _alive(self, owner: int) -> bool:
        pidfd = self._pidfds.get(owner)
        if pidfd is None:
            try:
                pidfd = os.pidfd_open(pid_of(owner))
            except ProcessLookupError:
                return False
            except OSError:  # out of descriptors, or no pidfd in this sandbox: the ticks alone
                return self._same_ticks(owner)
            if not self._same_ticks(owner):  # the pid was reused before we opened it
                os.close(pidfd)
                return False
            self._pidfds[owner] = pidfd
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        # POLLIN alone means dead; a descriptor that is closed shows POLLNVAL.
        if not any(events & select.POLLIN for _, events in poller.poll(0)):
            return True
        self._forget(owner)
        return False

    def state(self, owner: int) -> ProcessState:
        """Live, stopped (SIGSTOP, a debugger) or dead."""
        if not self.alive(owner):
            return ProcessState.DEAD
        try:
            letter = _stat_fields(pid_of(owner))[0]
        except OSError:
            return ProcessState.DEAD
        return ProcessState.STOPPED if letter in "Tt" else ProcessState.LIVE

    def keep_only(self, owners: set[int]) -> None:
        """Close the pidfds of everybody else."""
        with self._lock:
            for owner in list(self._pidfds):
                if owner not in owners:
                    self._forget(owner)

    def __len__(self) -> int:
        return len(self._pidfds)

    def close(self) -> None:
        """Close every pidfd."""
        self.keep_only(set())

    def _forget(self, owner: int) -> None:
        pidfd = self._pidfds.pop(owner, None)
        if pidfd is not None:
            os.close(pidfd)

    @staticmethod
    def _same_ticks(owner: int) -> bool:
        try:
            return start_ticks(pid_of(owner)) == owner & _TICKS_MASK
        except OSError:
            return False
