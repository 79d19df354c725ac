"""A control segment as a file: found by its name, opened, and its header read.

Names: arena "policy" is the POSIX shared-memory object /shmsync.policy, the file /dev/shm/shmsync.policy.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .. import _native
from ..errors import ArenaCorrupt, ArenaNotFound
from .process import close

PREFIX = "/shmsync."
FOLDER = "/dev/shm"
OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # as shm_open() opens
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of arenas


@contextmanager
def opened(name: str) -> Iterator[int | None]:
    """A descriptor of this arena's segment; None when there is none.

    Raises ArenaNotFound if it may not be opened, or if it is no plain file: what is read later is read from what was
    opened here. No link is followed, as by shm_open().
    """
    try:
        fd = os.open(FOLDER + PREFIX + name, OPEN)
    except FileNotFoundError:
        yield None
        return
    except PermissionError as error:
        raise ArenaNotFound(
            f"it is another user's: uid {os.geteuid()} may not open arena {name!r}; run the worker as the user of its "
            "publisher"
        ) from error
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise _squatted(name, _NO_FILE[error.errno]) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise _squatted(name, "a FIFO" if stat.S_ISFIFO(mode) else "a device")
        yield fd
    finally:
        close(fd)


_NO_FILE = {  # what opening a name gives that stands for no plain file
    errno.ELOOP: "a symbolic link",
    errno.EISDIR: "a directory",
    errno.ENXIO: "a socket, or a device that is not there",
    errno.ENODEV: "a device that is not there",
}


def _squatted(name: str, what: str) -> ArenaNotFound:
    return ArenaNotFound(
        f"{FOLDER}{PREFIX}{name} is {what}, and no segment of shmsync; see who made it, and remove it by hand, or use "
        "another name"
    )


def check_ours(name: str, fd: int) -> None:
    """Is it this user's, and could no other user have written it? Raises ArenaNotFound.

    A subscriber trusts its content, and so every user who could write it. That goes for root too.
    """
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise ArenaNotFound(
            f"arena {name!r} belongs to uid {status.st_uid} but this is uid {os.geteuid()}; run both sides as one user"
        )
    if status.st_mode & 0o022:
        raise ArenaNotFound(
            f"arena {name!r} has mode {stat.S_IMODE(status.st_mode):04o}, so that other users may have written it, but "
            f"0600 is needed; close its publisher and start it again"
        )


def foreign(header: _native.Header | None) -> bool:
    """Is it another program's file that only has a name like a segment's?

    A creator that dies leaves nothing, zeros, or what begins with the magic number.
    """
    return header is not None and header.magic not in (0, _native.MAGIC)


def check_readable(name: str, header: _native.Header) -> None:
    """Raise ArenaCorrupt for what is no segment, or one that this version of shmsync cannot read."""
    if header.magic != _native.MAGIC or header.endian != _native.ENDIAN_TAG:
        raise ArenaCorrupt(
            f"{FOLDER}{PREFIX}{name} is no segment of shmsync: it has magic {header.magic:#x} and endian tag "
            f"{header.endian:#x} but {_native.MAGIC:#x} and {_native.ENDIAN_TAG:#x} are needed; see who made it, and "
            "remove it by hand, or use another name"
        )
    wrong = ""
    if header.abi != _native.ABI:
        wrong = f"was made by a shmsync whose layout is number {header.abi}, but this one reads number {_native.ABI}"
    elif header.crc != zlib.crc32(header.covered):
        wrong = f"has a header of crc {zlib.crc32(header.covered):#x} that says {header.crc:#x}"
    elif not (0 < header.slots <= _native.MAX_SLOTS and 0 < header.readers <= _native.MAX_READERS):
        wrong = (
            f"has {header.slots} slots and {header.readers} reader rows, and there are at most {_native.MAX_SLOTS} and "
            f"{_native.MAX_READERS}"
        )
    if wrong:
        raise ArenaCorrupt(
            f"arena {name!r} {wrong}; run the same shmsync version on both sides, or remove it with `shmsync gc`"
        )


def nobody_proven_dead(uid: int) -> str:
    """Why a segment of another user's stays that is not ready: its header does not name an owner."""
    return f"it belongs to uid {uid} and its header does not name an owner process, so that no process is proven dead"


def stands_for(name: str, segment: os.stat_result) -> bool:
    """Does the name still stand for this segment? It is open or mapped, so that no other file has its inode."""
    try:
        return os.path.samestat(os.lstat(FOLDER + PREFIX + name), segment)
    except FileNotFoundError:
        return False


def unlink(name: str, segment: os.stat_result) -> None:
    """Remove the name if it still stands for this segment."""
    if stands_for(name, segment):
        with suppress(FileNotFoundError):
            os.unlink(FOLDER + PREFIX + name)


def replace(new: str, name: str, segment: os.stat_result) -> bool:
    """Let the name stand for the segment of the name `new`, which goes. False: it stands for another one than this."""
    if not stands_for(name, segment):
        return False
    os.rename(FOLDER + PREFIX + new, FOLDER + PREFIX + name)
    return True


def locked(fd: int) -> bool:
    """Is the segment's creator still at work? It holds the lock until the segment is ready, or it dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a process has the lock, or the system refused the call: then one may have it
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
