"""Processes: who they are, whether they live, and what the system refuses them.

Identity is pid + start ticks (field 22 of /proc/<pid>/stat) + image + boot id, in a pid namespace. A pid alone is
reused, and creation times computed from the wall clock move with it. The image stands for the program that the process
runs: exec keeps pid and start ticks, and drops the mappings of the program before.

Liveness is a pidfd: open it, poll it, then compare the owner word, since the pid may have been reused before it was
opened, and since it survives exec. Never the state letter of /proc/<pid>/stat: a process whose leader exited shows Z
while its threads run on. Where the pid cannot be seen, in another pid namespace, a lock that is held for life tells
(is_held()). Whatever cannot be found out, for lack of a descriptor or of memory, counts as alive.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import select
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import lru_cache
from multiprocessing.util import is_exiting
from typing import Any, NamedTuple, TypeVar

from .. import _native
from .._native import pid_of
from ..errors import NoSpace, ShmSyncError

T = TypeVar("T")


class ProcessState(str, Enum):
    """What another process is doing; a stopped one (SIGSTOP, a debugger) is alive."""

    LIVE = "live"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "unknown"  # from here, as in another container


class Identity(NamedTuple):
    """The identity of this process, as it is written into what it owns."""

    owner: int  # its owner word: pid, start ticks and image, see native/include/shmsync/layout.hpp
    boot_id: bytes
    pid_namespace: int


# Of /proc/<pid>/stat, counted from its third field: start and end of the code, start of the stack, start and end of the
# data, start of the heap. Not the addresses of arguments and environment, which programs that rename themselves move.
_STATE, _TICKS, _IMAGE = 0, 19, (23, 24, 25, 42, 43, 44)


def _stat_fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        text = file.read(4096).decode("utf-8", "replace")
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses


def owner_word(pid: int) -> int:
    """The owner word of what runs under this pid now; raises OSError when there is nothing."""
    fields = _stat_fields(pid)
    image = _native.image_from([int(fields[number]) for number in _IMAGE]) if len(fields) > max(_IMAGE) else 0
    return int(_native.pack_owner(pid, int(fields[_TICKS]), image))


@lru_cache(maxsize=4)
def _identity(pid: int, forks: int) -> Identity:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
    return Identity(owner_word(pid), boot_id, os.stat("/proc/self/ns/pid").st_ino)


def me() -> Identity:
    """Identity of the calling process; correct in a forked child too."""
    return _identity(os.getpid(), _native.fork_generation())  # a grandchild may get an ancestor's pid again


# Whether another process lives.


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


def dead_parent() -> int | None:
    """The pid of the process that started this one through multiprocessing, if it has ended; else None."""
    parent = multiprocessing.parent_process()
    try:
        return parent.pid if parent is not None and not parent.is_alive() else None
    except OSError:  # no memory for the look: we could not find out
        return None


class Peer:
    """Another process, known by its owner word or by its multiprocessing.Process.

    One that is known by its owner word ends when it runs another program, too. A Process does not show that: it may be
    a script that is about to run the worker's own program.

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
        self._ended = self.pid == 0 or self._exit_code is not None  # pid 0 is in rows of no owner, or garbage
        self._ended = self.dead

    @property
    def dead(self) -> bool:
        """Has it ended? A stopped process has not."""
        if not self._ended:
            try:
                self._ended = self._shows_its_end() or not self._may_be_itself()
            except ProcessLookupError:
                self._ended = True
        return self._ended

    @property
    def stopped(self) -> bool:
        """Is it stopped (SIGSTOP, a debugger)? False when that cannot be found out."""
        return _is_stopped(self.pid) and not self.dead

    def _shows_its_end(self) -> bool:
        if self.fd is None:
            try:
                self.fd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise
            except OSError:  # no descriptor is free, or this sandbox has no pidfd
                return False
            self._closing = weakref.finalize(self, close, self.fd)
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return any(events & select.POLLIN for _, events in poll(poller, 0))  # a closed descriptor shows POLLNVAL

    def _may_be_itself(self) -> bool:
        """False if the pid belongs to another process now, or runs another program."""
        if not self._owner:
            return True
        try:
            found = owner_word(self.pid)
        except (FileNotFoundError, ProcessLookupError):  # it is gone; or hidden from us, but there
            return exists(self.pid)
        except (OSError, ValueError):  # we could not find out, which does not mean dead
            return True
        self._replaced = not _native.may_be_same_owner(found, self._owner)
        return not self._replaced

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
            with suppress(ValueError):
                return f"pid {self.pid}, killed by {signal.Signals(-code).name}"
        return f"pid {self.pid}, exit code {code}"


def _is_stopped(pid: int) -> bool:
    """Does the kernel show this pid as stopped? Ask this before whether the process lives: its pid may be reused."""
    try:
        return _stat_fields(pid)[_STATE] in ("T", "t")  # by a signal, by a debugger
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
                self._known.pop(owner).close()
            return alive

    def state(self, owner: int) -> ProcessState:
        """Live, stopped (SIGSTOP, a debugger) or dead."""
        stopped = _is_stopped(pid_of(owner))
        if not self.alive(owner):
            return ProcessState.DEAD
        return ProcessState.STOPPED if stopped else ProcessState.LIVE

    def clear_dead(self, control: _native.Control, row: tuple[int, int]) -> bool:
        """Free this row (number, owner) of a reader table if its owner has ended. False: it lives, or has gone on."""
        number, owner = row
        return not self.alive(owner) and control.reap(number, owner, me().owner)

    def keep_only(self, owners: set[int]) -> None:
        """Close the pidfds of all other processes."""
        with self._lock:
            for owner in self._known.keys() - owners:
                self._known.pop(owner).close()

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Close every pidfd."""
        self.keep_only(set())


# A lock of an open file description tells that its holder lives, in whatever pid namespace.

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, pid; see fcntl(2)
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def hold_for_life(fd: int) -> None:
    """Lock a file, opened for writing, until no process has this open file description any more.

    Mappings of it and forked children count: map another description, and close this one in children.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)


def is_held(fd: int) -> bool:
    """Does another description of this file hold it for life, in whatever pid namespace? Takes no lock."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    except OSError:  # that could not be found out
        return True
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


# A fork, and the end of this process.

_closed_in_children: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def close_in_children(held: T, close_it: Callable[[T], None]) -> None:
    """Call close_it(held) in forked children, as long as `held` lives: there it is not theirs."""
    _closed_in_children[held] = close_it


def _after_fork() -> None:
    for held, close_it in reversed(list(_closed_in_children.items())):  # what owns others was made before them
        close_it(held)


os.register_at_fork(after_in_child=_after_fork)


def stay_if_exiting() -> None:
    """End a daemon thread while the process exits. Other threads return: the exit waits for them.

    The main thread closes the handles at exit. A daemon thread would find its arena closed under it, and print an error
    into the end of a program that has done nothing wrong.
    """
    if is_exiting() and threading.current_thread().daemon:
        raise SystemExit  # threading prints nothing of it


# Calls that the system may refuse, interrupt or half do.

_CURES = {
    errno.EMFILE: "raise the limit of open files with `ulimit -n`, or close some",
    errno.ENFILE: "raise fs.file-max, or end processes that hold many files open",
    errno.ENOMEM: "free some memory, or raise vm.max_map_count if this process has many mappings",
    errno.ENOSPC: "make /dev/shm larger, or remove what killed publishers left there with `shmsync gc`",
    errno.EACCES: "see who owns /dev/shm and what is in it",
}


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raise NoSpace where the system refuses what is needed: descriptors, memory, room or access. `what` was tried."""
    try:
        yield
    except ShmSyncError:  # some of them are OSErrors too
        raise
    except (OSError, MemoryError) as error:
        number = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
        cure = _CURES.get(number, "try again, and look into the kernel's log")
        reason = getattr(error, "strerror", None) or str(error) or "no memory"
        raise NoSpace(f"{what} failed, and changed nothing: {reason}; {cure}") from error


def close(fd: int) -> None:
    """Give a descriptor back. Linux does so even where the call reports an error."""
    with suppress(OSError):
        os.close(fd)


def poll(poller: select.poll, milliseconds: float) -> list[tuple[int, int]]:
    """What poller.poll() finds; nothing where the system lacked memory for the wait, which proves nothing."""
    try:
        return poller.poll(milliseconds)
    except OSError:
        time.sleep(0.0005)
        return []
