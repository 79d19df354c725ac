"""What killed publishers leave in /dev/shm: their control segments. Which process may remove them, when, and how.

A publisher has two locks on its segment. An flock, until it is ready. An open-file-description lock for life, which
tells processes of other pid namespaces, who cannot look at the owner's pid, whether the owner lives.

A process that gets the flock of a segment that is not ready, or whose owner is dead, may sweep (remove) it, after a
check that the name still stands for it. A segment whose owner cannot be examined is never swept: another user's, or on
a machine without a free descriptor.

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
from . import header as _header
from .header import FOLDER, NAME, PREFIX, opened
from .process import Peer, exists, is_held, me, pid_of, refusals

_log = logging.getLogger("shmsync")

_MOMENT = 0.002  # seconds that a new publisher sweeps; a few dozen segments
_MADE_UP = re.compile(r"[0-9]+-[0-9a-f]{12}")


def new_name() -> str:
    """A made-up name, to be unique."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"


def names() -> list[str]:
    """Every arena name on this machine, dead ones included. Raises NoSpace when that cannot be found out."""
    with refusals(f"listing {FOLDER}"):
        return sorted(_listed())


def _listed() -> list[str]:
    prefix = PREFIX[1:]
    try:
        entries = [entry[len(prefix) :] for entry in os.listdir(FOLDER) if entry.startswith(prefix)]
    except FileNotFoundError:
        return []
    return [name for name in entries if NAME.fullmatch(name)]  # others are no arenas, and could fool a terminal


class Dead(NamedTuple):
    """The segment of a dead publisher."""

    version: int  # the last one in it; 0: it has none
    inode: os.stat_result


@contextmanager
def taken(name: str) -> Iterator[Dead | None]:
    """The segment of this name, which no other process removes or replaces meanwhile; None when there is none.

    Raises ArenaExists, which says who has it; NoSpace and ArenaNotFound (another user's) when that cannot be found out.
    """
    with refusals(f"sweeping arena {name!r}"), opened(name) as fd:
        if fd is None:
            yield None
            return
        _refuse_live(name, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its creator is at work, or a process that removes it
            header = _native.read_identity(fd)
            if header is not None and may_live(header, fd):
                raise ArenaExists(_whose(header)) from None
            raise ArenaExists("another process is making or removing it") from None
        _refuse_live(name, fd)
        yield Dead(_last_version(name, fd), os.fstat(fd))


def sweep(name: str) -> int | None:
    """Remove the segment if its owner is dead. Returns the number of the last version in it; None: there is none.

    Raises what taken() raises.
    """
    with taken(name) as dead:
        if dead is None:
            return None
        _header.unlink(name, dead.inode)
        _log.info("arena %r: its publisher is dead, and what it left was removed", name)
        return dead.version


def _last_version(name: str, fd: int) -> int:
    """The last version of a dead publisher, 0 for none.

    With one slot, one that is half written counts. A publisher that died before it was ready has the last number of
    the one before it.
    """
    header = _native.read_identity(fd)
    if header is None or header.magic != _native.MAGIC or header.abi != _native.ABI:
        return 0
    if header.ready:
        try:
            _header.check_readable(name, header)
        except ArenaCorrupt:
            return 0
    state = _native.read_state(fd, header.slots, header.readers, header.manifest_bytes)
    if state is None:
        return 0
    begun = (state["seqs"][0] + header.ready) // 2 if header.slots == 1 else 0
    return int(max(state["version"], begun))


def _whose(header: _native.Header) -> str:
    here = me()
    if (header.owner, header.boot_id, header.pid_namespace) == here:
        return "it belongs to a Publisher of this process; close() that one first"
    if header.pid_namespace != here.pid_namespace:
        return "its publisher lives in another container (pid namespace); close it there"
    return f"process {pid_of(header.owner)} is alive; close it there"


def _refuse_live(name: str, fd: int) -> None:
    """Raise unless this process may remove the segment.

    Raises ArenaExists for an owner that may live, and ArenaNotFound, which says why it stays, for what is no segment,
    and for another user's unless this is root.
    """
    header = _native.read_identity(fd)
    if header is not None and header.ready and may_live(header, fd):
        raise ArenaExists(_whose(header))
    if _header.foreign(header):
        raise ArenaNotFound(f"it is no segment of shmsync; see who made {FOLDER}{PREFIX}{name}, and remove it by hand")
    uid = os.fstat(fd).st_uid
    if os.geteuid() not in (uid, 0):
        raise ArenaNotFound(f"arena {name!r} belongs to uid {uid}; only that user, or root, may remove it")
    if os.geteuid() != uid and (header is None or not header.ready):
        raise ArenaNotFound(_header.nobody_proven_dead(uid))


def sweep_some(seconds: float = _MOMENT) -> None:
    """Remove segments of made-up names, of this user, whose owners are proven dead, for so long. Never raises.

    It starts anywhere, so that each segment has its turn in the end.
    """
    deadline = time.monotonic() + seconds
    try:
        found = [name for name in _listed() if _MADE_UP.fullmatch(name)]
    except (OSError, MemoryError):
        return
    start = secrets.randbelow(len(found) + 1)
    for name in found[start:] + found[:start]:
        if time.monotonic() > deadline:
            break
        with suppress(ShmSyncError, OSError, MemoryError):
            if os.lstat(FOLDER + PREFIX + name).st_uid == os.geteuid():  # root may sweep others', but does not
                sweep(name)


def may_live(header: _native.Header, fd: int) -> bool:
    """Could the owner be alive? `fd`: of its segment, opened here.

    Its lock tells where its pid does not: in another pid namespace, and for this process, whose exec of the same
    program leaves the owner word as it was.
    """
    here = me()
    if header.magic != _native.MAGIC:
        return False
    if header.owner == here.owner or (header.boot_id, header.pid_namespace) != here[1:]:
        return is_held(fd)
    if header.abi != _native.ABI:  # of its owner word we know the pid only
        return exists(pid_of(header.owner))
    return not Peer(owner=header.owner).dead
