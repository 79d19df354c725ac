"""A control segment as a file: found by its name, opened, and its header checked; and whether its owner may live.

Names: arena "policy" is the POSIX shared-memory object /shmsync.policy, the file /dev/shm/shmsync.policy.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .. import _native
from ..errors import ArenaCorrupt, ArenaNotFound
from .manifest import Manifest, checked_manifest
from .process import Peer, close, exists, is_held, me, pid_of

FOLDER = "/dev/shm"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of arenas
PREFIX = "shmsync."
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)  # of opening a link, a folder, a socket, a device


def path_of(name: str) -> str:
    """The file that this arena's segment is."""
    return f"{FOLDER}/{PREFIX}{name}"


@contextmanager
def opened(name: str) -> Iterator[int | None]:
    """A descriptor of this arena's segment; None when there is none.

    Raises ArenaNotFound if it may not be opened, and ArenaCorrupt if it is no plain file: what is read later is read
    from what was opened here. No link is followed, as by shm_open().
    """
    try:
        fd = os.open(path_of(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except PermissionError as error:
        raise ArenaNotFound(
            f"it is another user's: uid {os.geteuid()} may not open arena {name!r}; run the worker as the user of its "
            "publisher"
        ) from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_segment(name) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _no_segment(name)
        yield fd
    finally:
        close(fd)


def _no_segment(name: str) -> ArenaCorrupt:
    return ArenaCorrupt(
        f"{path_of(name)} is no segment of shmsync; see who made it, and remove it by hand, or use another name"
    )


def read_header(name: str, fd: int) -> _native.Header:
    """The header of a segment, of any version of shmsync. Raises ArenaCorrupt for another program's file."""
    header = _native.read_identity(fd)
    if header is None or header.magic != _native.MAGIC or not header.ready:
        raise _no_segment(name)
    return header


def check_readable(name: str, header: _native.Header) -> None:
    """Raise ArenaCorrupt for a segment that this version of shmsync cannot read."""
    wrong = ""
    if header.abi != _native.ABI:
        wrong = f"was made by a shmsync whose layout is number {header.abi}, but this one reads number {_native.ABI}"
    elif not header.intact:
        wrong = "has a header with another crc than that of its words"
    elif not header.fits:
        wrong = (
            f"has a file of {header.file_bytes:,} bytes, which is not what {header.slots} slots, {header.readers} "
            f"reader rows and a manifest of {header.manifest_bytes:,} bytes take"
        )
    if wrong:
        raise ArenaCorrupt(
            f"arena {name!r} {wrong}; run the same shmsync version on both sides, or remove it with `shmsync gc`"
        )


def read_manifest(name: str, fd: int, header: _native.Header) -> Manifest:
    """The manifest of a segment with this header. Raises ArenaCorrupt."""
    check_readable(name, header)
    text = _native.read_manifest(fd, header)
    if text is None:
        raise ArenaCorrupt(f"the segment of arena {name!r} is shorter than its header says; look again")
    return checked_manifest(name, text, header)


def check_ours(name: str, fd: int) -> None:
    """Is it this user's? A subscriber trusts its content, and so its owner, for root too. Raises ArenaNotFound."""
    uid = os.fstat(fd).st_uid
    if uid != os.geteuid():
        raise ArenaNotFound(
            f"arena {name!r} belongs to uid {uid} but this is uid {os.geteuid()}; run both sides as one user"
        )


def may_live(header: _native.Header, fd: int) -> bool:
    """Could the owner be alive? `fd`: of its segment, opened here.

    Its lock tells where its pid does not: in another pid namespace, and for this process, whose exec of the same
    program leaves the owner word as it was.
    """
    here = me()
    if header.owner == here.owner or (header.boot_id, header.pid_namespace) != here[1:]:
        return is_held(fd)
    if header.abi != _native.ABI:  # of its owner word we know the pid only
        return exists(pid_of(header.owner))
    return not Peer(owner=header.owner).dead


def unlink(name: str, segment: os.stat_result) -> None:
    """Remove the name if it still stands for this segment. It is open or mapped, so no other file has its inode."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path_of(name)), segment):
            os.unlink(path_of(name))
