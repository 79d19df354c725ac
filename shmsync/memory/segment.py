"""The control segment: a small named shared-memory object that tells where the slab is and which version is current.

Names: arena "policy" is the POSIX shared-memory object /shmsync.policy. The creator holds an flock on the segment
until it is ready. Who gets the lock of a segment that is not ready, or whose owner is dead, may sweep (remove) it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import posix_ipc

from .. import _native
from ..errors import ArenaCorrupt, ArenaExists, ArenaNotFound, NoSpace, WriterDied
from .process import Peer, me, pid_of

PREFIX = "/shmsync."
_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Handle(NamedTuple):
    """What a worker needs to attach; pickles, so it goes into Process(args=...)."""

    name: str
    session: bytes


class Header(NamedTuple):
    """The header of a segment as it was read, not checked yet; see Identity in native/include/shmsync/layout.hpp."""

    ready: bool
    magic: int
    abi: int
    endian: int
    segment_bytes: int
    file_bytes: int  # size of the file; attach() wants it equal to segment_bytes
    session: bytes
    owner: int
    boot_id: bytes
    pid_namespace: int
    slots: int
    readers: int
    slot_bytes: int
    slab_kind: int
    slab_fd: int
    slab_inode: int
    manifest_offset: int
    manifest_bytes: int
    fingerprint: int
    crc: int
    covered: bytes  # the bytes that the crc covers


class Created(NamedTuple):
    """A segment whose creator still holds its lock; nobody attaches until make_ready()."""

    control: _native.Control
    fd: int


def new_name() -> str:
    """A random name, to be unique."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"


def check_name(name: str) -> str:
    """Return the name; raise ValueError when it cannot be part of a file name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"arena names are 1 to 200 of A-Z a-z 0-9 . _ - and start with a letter or digit, not {name!r}"
        )
    return name


def create(name: str, size: int, **header: Any) -> Created:
    """Make the segment of an arena. Raises ArenaExists when a live publisher has the name; sweeps a dead one's."""
    for _ in range(100):
        try:
            memory = posix_ipc.SharedMemory(PREFIX + name, posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.ExistentialError:
            owner = sweep(name)
            if owner is not None:
                raise ArenaExists(f"arena {name!r} {_whose(name, owner)}, or use another name") from None
            continue
        fcntl.flock(memory.fd, fcntl.LOCK_EX)
        if not _named(name, memory.fd):  # a sweeper locked and removed it between our two calls
            os.close(memory.fd)
            continue
        try:
            _allocate(memory.fd, size)
            return Created(_native.Control.create(fd=memory.fd, **header), memory.fd)
        except BaseException:
            unlink(name, memory.fd)
            os.close(memory.fd)
            raise
    raise ArenaExists(f"arena {name!r} is created and swept over and over by other processes; use another name")


def _whose(name: str, owner: int) -> str:
    """Whose it is, and what to do about it; of a name that is taken."""
    with _opened(name) as fd:
        header = None if fd is None else _read(fd)
    here = me()
    if header is not None and (header.owner, header.boot_id, header.pid_namespace) == here:
        return "belongs to a Publisher of this process; close() that one first"
    if owner == 0:  # its header is not written yet
        return "is just being made by another process; pass its handle to the workers"
    return f"belongs to live process {owner}; close it there"


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)  # ftruncate alone would leave a SIGBUS for later
    except OSError as error:
        raise NoSpace(
            f"the control segment needs {size:,} bytes of /dev/shm but got: {error.strerror}; make /dev/shm larger, or "
            "remove what killed publishers left there with `shmsync gc`"
        ) from error


def make_ready(created: Created) -> None:
    """Let subscribers attach, and release the creator's lock."""
    created.control.make_ready(zlib.crc32(created.control.identity_bytes()))
    fcntl.flock(created.fd, fcntl.LOCK_UN)


def attach(name: str, session: bytes | None, deadline: float) -> tuple[_native.Control, Header]:
    """Map the segment of a live arena, after checking all of its header. `session`: the handle's; None accepts any."""
    check_name(name)
    unlocked_since: float | None = None
    while True:
        with _opened(name) as fd:
            header = None if fd is None else _read(fd)
            if fd is None or (header is not None and header.ready):
                if fd is None or header is None:
                    raise ArenaNotFound(
                        f"there is no arena {name!r} (any more); start its publisher first, or check the name"
                    )
                if session is not None and header.session != session:
                    raise ArenaNotFound(
                        f"arena {name!r} is session {header.session.hex()} but the handle is of session "
                        f"{session.hex()}; the publisher was restarted, pass the new handle"
                    )
                _check_header(name, header)
                control = _native.Control.attach(fd, header.slots, header.readers, header.manifest_bytes)
                return control, header
            unlocked_since = None if _locked(fd) else unlocked_since or time.monotonic()
            if unlocked_since is not None and time.monotonic() - unlocked_since > 1.0:  # its creator is gone
                raise WriterDied(
                    f"the publisher of arena {name!r} died while it was creating the arena; start it again"
                )
        if time.monotonic() > deadline:
            raise ArenaNotFound(f"arena {name!r} is not ready; its publisher is still creating it, or died doing so")
        time.sleep(0.001)


def _locked(fd: int) -> bool:
    """Is the segment's creator still at work? It holds the lock until the segment is ready, or it dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def unlink(name: str, fd: int) -> None:
    """Remove the name if it still stands for this segment."""
    if _named(name, fd):
        try:
            posix_ipc.unlink_shared_memory(PREFIX + name)
        except posix_ipc.ExistentialError:
            pass


def sweep(name: str) -> int | None:
    """Remove the segment if its owner is dead. Returns the pid of a live owner; None when the name is free now."""
    with _opened(name) as fd:
        if fd is None:
            return None
        header = _read(fd)
        if header is not None and header.ready and _may_live(header):
            return pid_of(header.owner)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its creator is at work
            return pid_of(header.owner) if header else 0
        header = _read(fd)
        if header is not None and header.ready and _may_live(header):
            return pid_of(header.owner)
        unlink(name, fd)
        return None


def session_of(name: str) -> bytes | None:
    """The session of the arena of this name; None when there is none that is ready."""
    with _opened(name) as fd:
        header = None if fd is None else _read(fd)
    return header.session if header is not None and header.ready else None


def names() -> list[str]:
    """Every arena name on this machine, dead ones included."""
    prefix = PREFIX[1:]
    try:
        return sorted(entry[len(prefix) :] for entry in os.listdir(_FOLDER) if entry.startswith(prefix))
    except FileNotFoundError:
        return []


def owner_of(name: str) -> str:
    """One line about the process behind a name."""
    try:
        with _opened(name) as fd:
            header = None if fd is None else _read(fd)
    except ArenaNotFound:
        return "another user's"
    if header is None or not header.ready:
        return "not ready"
    pid = pid_of(header.owner)
    return f"pid {pid}" if _may_live(header) else f"pid {pid}, dead: `shmsync gc` removes it"


def _read(fd: int) -> Header | None:
    fields: dict[str, Any] | None = _native.read_identity(fd)
    return None if fields is None else Header(**fields)


def _may_live(header: Header) -> bool:
    """Could the owner be alive? True for one in another pid namespace, which cannot be looked at from here."""
    here = me()
    if header.magic != _native.MAGIC or header.boot_id != here.boot_id:
        return False
    if header.pid_namespace != here.pid_namespace:
        return True
    return not Peer(owner=header.owner).dead


def _check_header(name: str, header: Header) -> None:
    def need(what: str, found: object, expected: object, error: type[Exception] = ArenaCorrupt) -> None:
        if found != expected:
            raise error(f"arena {name!r} has {what} {found!r} but {expected!r} is needed; {_NEXT[error]}")

    here = me()
    need("magic", header.magic, _native.MAGIC)
    need("abi", header.abi, _native.ABI)
    need("endian tag", header.endian, _native.ENDIAN_TAG)
    need("slab kind", header.slab_kind, _native.SLAB_MEMFD)
    need("crc", header.crc, zlib.crc32(header.covered))
    if not (0 < header.slots <= _native.MAX_SLOTS and 0 < header.readers <= _native.MAX_READERS):
        raise ArenaCorrupt(f"arena {name!r} has {header.slots} slots and {header.readers} reader rows")
    size = _native.segment_bytes(header.slots, header.readers, header.manifest_bytes)
    need("segment size", header.segment_bytes, size)
    need("file size", header.file_bytes, size)
    need("manifest offset", header.manifest_offset, _native.manifest_offset(header.slots))
    need("boot id", header.boot_id, here.boot_id, ArenaNotFound)
    need("pid namespace", header.pid_namespace, here.pid_namespace, ArenaNotFound)
    if Peer(owner=header.owner).dead:
        raise WriterDied(f"the publisher of arena {name!r} (pid {pid_of(header.owner)}) is dead; start it again")


_NEXT: dict[type[Exception], str] = {
    ArenaCorrupt: "both sides must run the same shmsync version; otherwise remove it with `shmsync gc`",
    ArenaNotFound: "run publisher and subscriber in the same container or virtual machine",
}


@contextmanager
def _opened(name: str) -> Iterator[int | None]:
    try:
        memory = posix_ipc.SharedMemory(PREFIX + name)
    except posix_ipc.ExistentialError:
        yield None
        return
    except posix_ipc.PermissionsError as error:
        raise ArenaNotFound(f"arena {name!r} belongs to another user; run the worker as that user") from error
    try:
        yield memory.fd
    finally:
        os.close(memory.fd)


def _named(name: str, fd: int) -> bool:
    """Does the name still stand for the segment behind this descriptor?"""
    try:
        named = os.stat(_FOLDER + PREFIX + name)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
