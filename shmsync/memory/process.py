"""Who a process is, and whether it still lives.

Identity is pid + start ticks (field 22 of /proc/<pid>/stat) + boot id: a pid alone is reused, and creation times
computed from the wall clock move with it. Liveness is a pidfd: open it, then compare the ticks, then poll it.
Never the state letter of /proc/<pid>/stat: a process whose leader exited shows Z while its threads run on.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from .. import _native
from .._native import pid_of


class ProcessState(str, Enum):
    """What a peer process is doing."""

    LIVE = "live"
    STOPPED = "stopped"
    DEAD = "dead"


class Identity(NamedTuple):
    """This process, as it signs what it owns."""

    owner: int  # its owner word: pid and start ticks, see native/include/shmsync/layout.hpp
    boot_id: bytes
    pid_namespace: int


def _stat_fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read().decode("utf-8", "replace")
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses


def owner_word(pid: int) -> int:
    """The owner word of the process that has this pid now; raises OSError when there is none."""
    return int(_native.pack_owner(pid, int(_stat_fields(pid)[19])))


@lru_cache(maxsize=4)
def _identity(pid: int, forks: int) -> Identity:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
    return Identity(owner_word(pid), boot_id, os.stat("/proc/self/ns/pid").st_ino)


def me() -> Identity:
    """Identity of the calling process; right after a fork too."""
    return _identity(os.getpid(), _native.fork_generation())  # a grandchild may get an ancestor's pid again


class Peer:
    """Another process, known by its owner word or by its multiprocessing.Process.

    Raises ValueError for a Process that is not started.
    """

    def __init__(self, *, owner: int = 0, process: Any = None) -> None:
        self._owner = owner  # 0: a child of ours, which keeps its pid until we wait for it
        self._process = process
        self.pid: int = pid_of(owner) if process is None else process.pid
        if self.pid is None:
            raise ValueError("this worker process is not started; call its start() first")
        self.fd: int | None = None  # a pidfd, which poll() finds readable when the process has ended
        self._closing: weakref.finalize[..., Any] | None = None
        self._dead = process is not None and process.exitcode is not None
        if not self._dead:
            self._open()

    def _open(self) -> None:
        try:
            self.fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._dead = True
        except OSError:  # no descriptor is free, or this sandbox has no pidfd
            self._dead = not self._has_its_pid()
        else:
            self._closing = weakref.finalize(self, os.close, self.fd)
            self._dead = not self._has_its_pid()  # the pid may have been reused before we opened it

    def _has_its_pid(self) -> bool:
        try:
            return not self._owner or owner_word(self.pid) == self._owner
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:  # it could not be found out, which is not "dead"
            return True

    @property
    def dead(self) -> bool:
        """Has it ended? A stopped process has not."""
        return self.ends_within(0)

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end."""
        if not self._dead:
            if self.fd is None:
                self._open()
            else:
                poller = select.poll()
                poller.register(self.fd, select.POLLIN)
                # POLLIN alone means dead; a descriptor that somebody closed shows POLLNVAL.
                self._dead = any(events & select.POLLIN for _, events in poller.poll(int(seconds * 1000)))
        return self._dead

    @property
    def finished(self) -> bool:
        """Did it end by itself, with exit code 0? Known of a Process only."""
        if self._process is None or not self.dead:
            return False
        try:
            self._process.join(1)  # a fork server tells the code a moment after the death
        except ValueError:  # its close() was called
            return False
        return self._exit_code == 0

    @property
    def _exit_code(self) -> int | None:
        try:
            return getattr(self._process, "exitcode", None)
        except ValueError:
            return None

    def close(self) -> None:
        """Close the pidfd. Idempotent; it also happens when the Peer is collected."""
        if self._closing is not None:
            self._closing()
        self.fd = None

    def __str__(self) -> str:
        code = self._exit_code
        if code is None:
            return f"pid {self.pid}"
        if code < 0:
            try:
                return f"pid {self.pid}, killed by {signal.Signals(-code).name}"
            except ValueError:
                pass
        return f"pid {self.pid}, exit code {code}"


class Peers:
    """Other processes by owner word; keeps one pidfd for each, so that asking again costs one poll. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, Peer] = {}
        self._lock = threading.RLock()  # a finaliser may close in the middle of a question

    def alive(self, owner: int) -> bool:
        """Does the process behind this owner word still run? A stopped one does."""
        with self._lock:
            peer = self._known.get(owner)
            if peer is None:
                peer = self._known[owner] = Peer(owner=owner)
            alive = not peer.dead
            if not alive or peer.fd is None:
                self._forget(owner)
            return alive

    def state(self, owner: int) -> ProcessState:
        """Live, stopped (SIGSTOP, a debugger) or dead."""
        if not self.alive(owner):
            return ProcessState.DEAD
        try:
            letter = _stat_fields(pid_of(owner))[0]
        except (FileNotFoundError, ProcessLookupError):
            return ProcessState.DEAD
        except OSError:
            return ProcessState.LIVE
        return ProcessState.STOPPED if letter in "Tt" else ProcessState.LIVE

    def keep_only(self, owners: set[int]) -> None:
        """Close the pidfds of everybody else."""
        with self._lock:
            for owner in list(self._known):
                if owner not in owners:
                    self._forget(owner)

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Close every pidfd."""
        self.keep_only(set())

    def _forget(self, owner: int) -> None:
        peer = self._known.pop(owner, None)
        if peer is not None:
            peer.close()
