"""The identity of a process, and whether it still lives.

Identity is pid + start ticks (field 22 of /proc/<pid>/stat) + image + boot id. A pid alone is reused, and creation
times computed from the wall clock move with it. The image stands for the program that the process runs: exec keeps pid
and start ticks, and drops the mappings of the program before (docs/adr/0021-an-image-in-the-owner-word.md).

Liveness is a pidfd: open it, then compare the owner word, then poll it, and compare again when it shows no end, since
a pidfd survives exec. Never the state letter of /proc/<pid>/stat: a process whose leader exited shows Z while its
threads run on. Whatever cannot be found out, for lack of a descriptor or of memory, counts as alive.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from enum import Enum
from functools import lru_cache
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ... import _native
from ..._native import pid_of
from .calls import close, poll


class ProcessState(str, Enum):
    """What a peer process is doing."""

    LIVE = "live"
    STOPPED = "stopped"
    DEAD = "dead"


class Identity(NamedTuple):
    """The identity of this process, as it is written into what it owns."""

    owner: int  # its owner word: pid, start ticks and image, see native/include/shmsync/layout.hpp
    boot_id: bytes
    pid_namespace: int


# Of /proc/<pid>/stat, counted from its third field: start and end of the code, start of the stack, start and end of the
# data, start of the heap. Not the addresses of arguments and environment, which programs that rename themselves move.
_STATE, _TICKS, _IMAGE = 0, 19, (23, 24, 25, 42, 43, 44)
_TRIES, _BETWEEN_TRIES = 50, 0.02  # to start a process by a fork server, seconds
_STOPPED = ("T", "t")  # by a signal, by a debugger


def _stat_fields(pid: int) -> list[str]:
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 4096).decode("utf-8", "replace")
    finally:
        close(fd)
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses


def owner_word(pid: int) -> int:
    """The owner word of what runs under this pid now; raises OSError when there is nothing."""
    fields = _stat_fields(pid)
    image = _native.image_from([int(fields[number]) for number in _IMAGE]) if len(fields) > max(_IMAGE) else 0
    return int(_native.pack_owner(pid, int(fields[_TICKS]), image))


def exists(pid: int) -> bool:
    """Is there any process of this pid?"""
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)  # sends nothing, and needs no descriptor
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@lru_cache(maxsize=4)
def _identity(pid: int, forks: int) -> Identity:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
    return Identity(owner_word(pid), boot_id, os.stat("/proc/self/ns/pid").st_ino)


def me() -> Identity:
    """Identity of the calling process; correct in a forked child too."""
    return _identity(os.getpid(), _native.fork_generation())  # a grandchild may get an ancestor's pid again


def dead_parent() -> int | None:
    """The pid of the process that started this one through multiprocessing, if it has ended; else None."""
    parent = multiprocessing.parent_process()
    try:
        return parent.pid if parent is not None and not parent.is_alive() else None
    except OSError:  # no memory for the look: we could not find out
        return None


class Peer:
    """Another process, known by its owner word or by its multiprocessing.Process, or by both.

    One that is known by its owner word ends when it runs another program, too. A Process alone does not show that: it
    may be a script that is about to run the worker's own program.

    Raises ValueError for a Process that is not started.
    """

    def __init__(self, *, owner: int = 0, process: Any = None) -> None:
        self._owner = owner
        self._process = process  # our own child, whose pid is not reused until we wait for it
        self.pid: int = pid_of(owner) if process is None else process.pid
        if self.pid is None:
            raise ValueError("this worker process is not started; call its start() first")
        self.fd: int | None = None  # a pidfd, which poll() finds readable when the process has ended
        self._closing: weakref.finalize[..., Any] | None = None
        self._replaced = False  # by another program
        self._dead = self.pid == 0 or self._exit_code is not None  # pid 0 is in rows of no owner, or garbage
        if not self._dead:
            self._open()

    def introduce(self, owner: int) -> None:
        """The program in this Process has said who it is. Does nothing when that is another process, or known."""
        if not self._owner and pid_of(owner) == self.pid:
            self._owner = owner

    def _open(self) -> None:
        try:
            self.fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._dead = True
        except OSError:  # no descriptor is free, or this sandbox has no pidfd
            self._dead = not self._may_be_itself()
        else:
            self._closing = weakref.finalize(self, close, self.fd)
            self._dead = not self._may_be_itself()  # the pid may have been reused before we opened it

    def _may_be_itself(self) -> bool:
        """False if the pid belongs to another process now, or to none, or runs another program."""
        if not self._owner:
            return True
        try:
            found = owner_word(self.pid)
        except (FileNotFoundError, ProcessLookupError):  # it is gone; or hidden from us, but there
            return exists(self.pid) and (self.fd is None or not self._shows_its_end(0))
        except (OSError, ValueError):  # we could not find out, which does not mean dead
            return True
        self._replaced = not _native.may_be_same_owner(found, self._owner)
        return not self._replaced

    @property
    def dead(self) -> bool:
        """Has it ended? A stopped process has not."""
        return self.ends_within(0)

    @property
    def stopped(self) -> bool:
        """Is it stopped (SIGSTOP, a debugger)? False when that cannot be found out."""
        return _is_stopped(self.pid) and not self.dead

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for its end. Has it ended?"""
        if not self._dead:
            if self.fd is None:
                self._open()
            else:
                self._dead = self._shows_its_end(seconds) or not self._may_be_itself()
        return self._dead

    def _shows_its_end(self, seconds: float) -> bool:
        assert self.fd is not None
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        # POLLIN alone means dead; a closed descriptor shows POLLNVAL.
        return any(events & select.POLLIN for _, events in poll(poller, int(seconds * 1000)))

    @property
    def finished(self) -> bool:
        """Did it exit with code 0? Only a multiprocessing.Process can tell; False without one."""
        if self._process is None or not self.dead or self._replaced:  # the other program may run for long
            return False
        try:
            # A fork server reports the exit code a moment after the death. The caller's deadline may be over already.
            self._process.join(0.08)
        except (ValueError, OSError):  # its close() was called; or the system had no memory for the wait
            return False
        return self._exit_code == 0

    @property
    def _exit_code(self) -> int | None:
        try:
            return getattr(self._process, "exitcode", None)
        except (ValueError, OSError):  # its close() was called; or it could not be found out
            return None

    def close(self) -> None:
        """Close the pidfd. Idempotent; it also happens when the Peer is collected."""
        if self._closing is not None:
            self._closing()
        self.fd = None

    def __str__(self) -> str:
        code = self._exit_code
        if code is None:
            return f"pid {self.pid}, which runs another program now" if self._replaced else f"pid {self.pid}"
        if code < 0:
            try:
                return f"pid {self.pid}, killed by {signal.Signals(-code).name}"
            except ValueError:
                pass
        return f"pid {self.pid}, exit code {code}"


def _is_stopped(pid: int) -> bool:
    """Does the kernel show this pid as stopped? Ask this before whether the process lives: its pid may be reused."""
    try:
        return _stat_fields(pid)[_STATE] in _STOPPED
    except (OSError, ValueError):  # it is gone, or that could not be found out
        return False


class Peers:
    """Other processes by owner word; keeps one pidfd for each, so that asking again costs one poll. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, Peer] = {}
        self._lock = threading.RLock()  # re-entrant: a finaliser may call close() while it is held

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
        stopped = _is_stopped(pid_of(owner))
        if not self.alive(owner):
            return ProcessState.DEAD
        return ProcessState.STOPPED if stopped else ProcessState.LIVE

    def keep_only(self, owners: set[int]) -> None:
        """Close the pidfds of all other processes."""
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


def start_process(process: BaseProcess) -> None:
    """process.start(), again where Python's fork server is ending.

    An interrupt of an earlier start() may end that server: it was connected to, and got no descriptors. Until it is
    seen to be dead, and is started again, it may still accept connections that it never serves.
    """
    tries = _TRIES if isinstance(process, ForkServerProcess) else 1
    for left in reversed(range(tries)):
        try:
            process.start()
            return
        except (EOFError, ConnectionError):
            if left == 0:
                raise
            time.sleep(_BETWEEN_TRIES)
