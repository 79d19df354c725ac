"""What killed publishers leave in /dev/shm: their control segments. Which process may remove them, when, and how.

A publisher holds an open-file-description lock on its segment for life. It tells processes of other pid namespaces, who
cannot look at the owner's pid, whether the owner lives. A process that finds the owner dead takes the flock, and may
then sweep (remove) the segment, or let its name stand for another one. A segment whose owner cannot be examined is
never swept: another user's, or on a machine without a free descriptor.

Segments of made-up names would stay until the user calls `shmsync gc`, and a publisher that is killed and started again
over and over would fill /dev/shm. So each new publisher sweeps those for a moment. A name that a user has chosen stays
for its next publisher, which continues the numbers of its versions.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from .. import _native
from ..errors import ArenaCorrupt, ArenaExists, ArenaNotFound, ShmSyncError
from . import segment_file
from .process import me, pid_of, refusals
from .segment_file import FOLDER, NAME, PREFIX, check_readable, may_live, opened, path_of, read_header

_log = logging.getLogger("shmsync")
_MADE_UP = re.compile(r"[0-9]+-[0-9a-f]{12}")
_MOMENT = 0.002  # seconds that a new publisher sweeps; a few dozen segments


def new_name() -> str:
    """A made-up name, to be unique."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"


def names() -> list[str]:
    """Every arena name on this machine, dead ones included. Raises NoSpace when that cannot be found out."""
    with refusals(f"listing {FOLDER}"):
        try:
            found = sorted(entry[len(PREFIX) :] for entry in os.listdir(FOLDER) if entry.startswith(PREFIX))
        except FileNotFoundError:
            return []
        return [name for name in found if NAME.fullmatch(name)]  # others are no arenas, and could fool a terminal


class Dead(NamedTuple):
    """The segment of a dead publisher."""

    version: int  # the last one in it; 0: it has none that can be read
    stat: os.stat_result


@contextmanager
def taken(name: str) -> Iterator[Dead | None]:
    """The segment of this name, which no other process removes or replaces meanwhile; None when there is none.

    Raises ArenaExists, which says who has it; ArenaCorrupt for another program's file; NoSpace and ArenaNotFound
    (another user's) when that cannot be found out.
    """
    with refusals(f"sweeping arena {name!r}"), opened(name) as fd:
        if fd is None:
            yield None
            return
        header = read_header(name, fd)
        uid = os.fstat(fd).st_uid
        if os.geteuid() not in (uid, 0):
            raise ArenaNotFound(f"arena {name!r} belongs to uid {uid}; only that user, or root, may remove it")
        if may_live(header, fd):
            raise ArenaExists(_whose(header))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArenaExists("its publisher is dead, and another process is removing it") from None
        yield Dead(_last_version(name, header, fd), os.fstat(fd))


def sweep(name: str) -> int | None:
    """Remove the segment if its owner is dead. Returns the number of the last version in it; None: there is none.

    Raises what taken() raises.
    """
    with taken(name) as dead:
        if dead is None:
            return None
        segment_file.unlink(name, dead.stat)
        log_removed(name)
        return dead.version


def log_removed(name: str) -> None:
    """Tell the log that what a dead publisher had left under this name is gone."""
    _log.info("arena %r: its publisher is dead, and what it left was removed", name)


def _last_version(name: str, header: _native.Header, fd: int) -> int:
    """The last version of a dead publisher; 0 where this shmsync cannot read it.

    With one slot, one that is half written counts.
    """
    try:
        check_readable(name, header)
    except ArenaCorrupt:
        return 0
    seen = _native.Control.attach(fd, header).look()
    return int(max(seen["version"], (seen["seqs"][0] + 1) // 2 if header.slots == 1 else 0))


def _whose(header: _native.Header) -> str:
    here = me()
    if (header.owner, header.boot_id, header.pid_namespace) == here:
        return "it belongs to a Publisher of this process; close() that one first"
    if header.pid_namespace != here.pid_namespace:
        return "its publisher lives in another container (pid namespace); close it there"
    return f"process {pid_of(header.owner)} is alive; close it there"


def sweep_some(seconds: float = _MOMENT) -> None:
    """Remove segments of made-up names, of this user, whose owners are proven dead, for so long. Never raises.

    It starts anywhere, so that each segment has its turn in the end.
    """
    deadline = time.monotonic() + seconds
    try:
        found = [name for name in names() if _MADE_UP.fullmatch(name)]
    except ShmSyncError:
        return
    start = secrets.randbelow(len(found) + 1)
    for name in found[start:] + found[:start]:
        if time.monotonic() > deadline:
            break
        with suppress(ShmSyncError, OSError, MemoryError):
            if os.lstat(path_of(name)).st_uid == os.geteuid():  # root may sweep others', but does not
                sweep(name)
