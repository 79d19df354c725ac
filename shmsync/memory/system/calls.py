"""Calls to the system that it may refuse, interrupt or half do: how shmsync makes them, and what it says of them."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...errors import NoSpace, ShmSyncError

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, pid; see fcntl(2)

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


def take_lock(fd: int, deadline: float) -> bool:
    """Lock a file. False: another process had it until then; a wait without limit may wait for a stopped process."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.001)


def hold_for_life(fd: int) -> None:
    """Lock a file, opened for writing, until no process has this open file description any more.

    Mappings of it and forked children count: map another description, and close this one in children.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def is_held(fd: int) -> bool:
    """Does another description of this file hold it for life, in whatever pid namespace? Takes no lock."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:  # that could not be found out
        return True
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
