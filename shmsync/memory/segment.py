"""The control segment: a small named shared-memory object that tells where the slab is and which version is current.

Its publisher holds two locks on it; leftovers.py says what they are for. Its reader table is native
(native/src/reader_table.cpp); Python sees a Row for each subscriber.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import math
import os
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .. import _native
from ..errors import ArenaCorrupt, ArenaExists, ArenaNotFound, NoSpace, WriterDied
from .header import (
    FOLDER,
    NAME,
    OPEN,
    PREFIX,
    check_ours,
    check_readable,
    locked,
    opened,
    replace,
    stands_for,
    unlink,
)
from .leftovers import new_name, sweep_some, taken
from .process import Peer, close, close_in_children, hold_for_life, me, pid_of

T = TypeVar("T")

_log = logging.getLogger("shmsync")

_LOOK_FOR_NAME = 0.005  # seconds between two looks for an arena that does not exist yet
_CLOSED = 1  # the state of an arena; native/include/shmsync/layout.hpp
_LOCK_WAIT = 1.0  # seconds; a sweeper that is not stopped has the lock for microseconds


class Handle(NamedTuple):
    """What a worker needs to attach; pickles, so it goes into Process(args=...).

    Attributes:
        name: of the arena.
        session: the random id of its publisher's life.
    """

    name: str
    session: bytes


@dataclass(eq=False)
class Created:
    """A segment whose publisher holds its locks; no process attaches until make_ready()."""

    control: _native.Control
    inode: os.stat_result  # by which withdraw() knows it
    follows: int  # the last version of the dead publisher that had this name; 0: of none
    _fd: int  # the locks', which no mapping shares

    def __post_init__(self) -> None:
        close_in_children(self, Created.unlock)

    def unlock(self) -> None:
        """Give both locks back, and close their descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


RowId = tuple[int, int]  # (number, owner): a row of the reader table, for as long as it has this owner


def figures(row: _native.Row, version: int) -> dict[str, Any]:
    """The figures of a row, by the names that ReaderInfo and ReaderSeen have for them; `version`: the published one."""
    told = {field: getattr(row, field) for field in ("worker", "pid", "acked", "pinned", "pin_age")}
    return told | {"lag": max(0, version - row.acked), "reads": row.reads, "torn": row.torn, "retries": row.retries}


def check_name(name: str) -> str:
    """Return the name; raise ValueError when it cannot be part of a file name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"arena names are 1 to 200 of A-Z a-z 0-9 . _ - and start with a letter or digit, not {name!r}"
        )
    return name


def create(name: str, size: int, **header: Any) -> Created:
    """Make the segment of an arena; sweeps what dead publishers left. Raises ArenaExists, NoSpace.

    That of a dead publisher of this name is replaced in one step, so that the number of its last version is never lost.
    """
    sweep_some()
    for _ in range(100):
        fd = _make(name)
        if fd is not None:
            created = _created(name, fd, size, follows=0, **header)
            if created is not None:
                return created
            continue
        with ExitStack() as hold:
            try:
                dead = hold.enter_context(taken(name))
            except (ArenaExists, ArenaNotFound) as error:
                ranks = os.environ.get("WORLD_SIZE", "1") != "1"  # torchrun, or torch.distributed
                cure = "; each rank runs this program: publish from one rank" if ranks else ""
                raise ArenaExists(f"the name of arena {name!r} is taken: {error}, or use another name{cure}") from error
            beside = new_name()
            if dead is not None and (fd := _make(beside)) is not None:
                created = _created(beside, fd, size, follows=dead.version, **header)
                if created is not None and replace(beside, name, dead.inode):
                    _log.info("arena %r: its publisher is dead, and what it left was removed", name)
                    return created
                if created is not None:
                    withdraw(beside, created.inode)
                    created.unlock()
    raise ArenaExists(f"arena {name!r} is created and swept over and over by other processes; use another name")


def _created(name: str, fd: int, size: int, **header: Any) -> Created | None:
    """Fill a new segment of this name, and lock it; None: another process has removed it. Closes `fd`."""
    lock = -1
    try:
        lock = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # a description that nothing maps
        # A process that took it for a leftover has the lock for a moment.
        ours = _take_lock(lock, time.monotonic() + _LOCK_WAIT)
        inode = os.fstat(fd)
        if ours and stands_for(name, inode):  # else a sweeper locked and removed it between our two calls
            hold_for_life(lock)
            _allocate(fd, size)
            created = Created(_native.Control.create(fd=fd, **header), inode, header["follows"], lock)
            lock = -1
            return created
    except BaseException:
        withdraw(name, os.fstat(fd))
        raise
    finally:
        close(fd)
        if lock >= 0:
            close(lock)
    if not ours:  # the name is left to the holder of the lock, and to later sweeps
        raise ArenaExists(
            f"arena {name!r} is being removed by another process, which has stood still for {_LOCK_WAIT:g} s; "
            "use another name, or let that process go on or end it"
        )
    return None


def session_of(name: str) -> bytes | None:
    """The session of the arena of this name; None when there is none that is ready."""
    with opened(name) as fd:
        header = None if fd is None else _native.read_identity(fd)
    return header.session if header is not None and header.ready else None


def _make(name: str) -> int | None:
    """A descriptor of a new segment of this name; None when there is one."""
    try:
        return _with_room_for(lambda: os.open(FOLDER + PREFIX + name, OPEN | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return None


def _take_lock(fd: int, deadline: float) -> bool:
    """Lock a file. False: another process had it until then; a wait without limit may wait for a stopped process."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.001)


def _allocate(fd: int, size: int) -> None:
    try:
        _with_room_for(lambda: os.posix_fallocate(fd, 0, size))  # ftruncate alone would leave a SIGBUS for later
    except OSError as error:
        raise NoSpace(
            f"the control segment needs {size:,} bytes of {FOLDER} but got: {error.strerror}; make it larger, or "
            "close other publishers. `shmsync gc` removes what killed ones left there"
        ) from error


def _with_room_for(call: Callable[[], T]) -> T:
    """Call it, and once more when /dev/shm was full of what dead publishers left."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    sweep_some(math.inf)
    return call()


def make_ready(created: Created) -> None:
    """Let subscribers attach, and release the flock."""
    created.control.make_ready(zlib.crc32(created.control.identity_bytes()))
    fcntl.flock(created._fd, fcntl.LOCK_UN)


def attach(name: str, session: bytes | None, deadline: float) -> tuple[_native.Control, _native.Header]:
    """Map the segment of a live arena, after checking all of its header.

    `session`: the handle's. None accepts any, and waits until there is one; a handle's arena was there already.
    """
    check_name(name)
    began = time.monotonic()
    unlocked_since: float | None = None
    while True:
        with opened(name) as fd:
            now = time.monotonic()
            if fd is not None:
                header = _native.read_identity(fd)
                if header is not None and header.ready:
                    if session is not None and header.session != session:
                        raise ArenaNotFound(
                            f"arena {name!r} is session {header.session.hex()} but the handle is of session "
                            f"{session.hex()}; the publisher was restarted, pass the new handle"
                        )
                    check_ours(name, fd)
                    _check_header(name, header)
                    control = _native.Control.attach(fd, header.slots, header.readers, header.manifest_bytes)
                    return control, header
                unlocked_since = None if locked(fd) else unlocked_since or now
                if unlocked_since is not None and now - unlocked_since > 1.0:  # its creator is gone
                    raise WriterDied(
                        f"the publisher of arena {name!r} died while it was creating the arena; start it again"
                    )
                if now > deadline:
                    raise ArenaNotFound(
                        f"arena {name!r} is not ready; its publisher is still creating it, or died doing so"
                    )
            elif session is not None or now >= deadline:
                raise ArenaNotFound(_no_arena(name, session, now - began))
        time.sleep(0.001 if fd is not None else max(0.0, min(_LOOK_FOR_NAME, deadline - now)))


def _no_arena(name: str, session: bytes | None, waited: float) -> str:
    if (pid := _publisher_of_removed(name, session)) is not None:
        return (
            f"the segment of arena {name!r} was removed while its publisher (pid {pid}) lives, as cleaners do; "
            "processes that are attached go on, new ones need a new Publisher. `shmsync doctor` names a usual one"
        )
    if session is not None:
        return f"there is no arena {name!r} any more; its publisher was closed or has died, start it again"
    return (
        f"there is no arena {name!r}, after waiting {waited:.3g} s for it; start its publisher, check the name, or "
        "give more time with timeout="
    )


def _publisher_of_removed(name: str, session: bytes | None) -> int | None:
    """The pid of a publisher whose segment has lost its name: it alone has the removed file open, for its locks."""
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # another user's, or gone
            if os.readlink(link) != f"{FOLDER}{PREFIX}{name} (deleted)":
                continue
            fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            try:
                header = _native.read_identity(fd)
                if header is None or not header.ready or session not in (None, header.session):
                    continue
                state = _native.read_state(fd, header.slots, header.readers, header.manifest_bytes)
            finally:
                close(fd)
            if state is not None and state["state"] != _CLOSED:  # close() removes the name, too
                return int(link.split("/")[2])
    return None


def withdraw(name: str, inode: os.stat_result) -> None:
    """Remove the name if it still stands for this segment, which is open or mapped here."""
    try:
        try:
            unlink(name, inode)
        except OSError:
            unlink(name, inode)  # the system had no memory for a moment, say
    except OSError as error:
        warnings.warn(
            f"arena {name!r} is closed, but its control segment stays in {FOLDER}: {error}; `shmsync gc` removes it "
            "when this process has ended",
            ResourceWarning,
            stacklevel=2,
        )


def _check_header(name: str, header: _native.Header) -> None:
    def need(what: str, found: object, expected: object, error: type[Exception] = ArenaCorrupt) -> None:
        if found != expected:
            raise error(f"arena {name!r} has {what} {found!r} but {expected!r} is needed; {_NEXT[error]}")

    check_readable(name, header)
    if header.manifest_bytes > header.file_bytes:  # before sums in which it could wrap around
        raise ArenaCorrupt(
            f"arena {name!r} has a manifest of {header.manifest_bytes:,} bytes in a segment of {header.file_bytes:,}; "
            f"{_NEXT[ArenaCorrupt]}"
        )
    size = _native.segment_bytes(header.slots, header.readers, header.manifest_bytes)
    need("segment size", header.segment_bytes, size)
    need("file size", header.file_bytes, size)
    need("manifest offset", header.manifest_offset, _native.manifest_offset(header.slots))
    here = me()
    need("boot id", header.boot_id, here.boot_id, ArenaNotFound)
    need("pid namespace", header.pid_namespace, here.pid_namespace, ArenaNotFound)
    if Peer(owner=header.owner).dead:
        raise WriterDied(f"the publisher of arena {name!r} (pid {pid_of(header.owner)}) is dead; start it again")


_NEXT: dict[type[Exception], str] = {
    ArenaCorrupt: "both sides must run the same shmsync version; otherwise remove it with `shmsync gc`",
    ArenaNotFound: "run both in one container or virtual machine, or let the containers share processes "
    "(docker run --pid=container:NAME, shareProcessNamespace in Kubernetes)",
}
