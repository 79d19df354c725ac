"""A control segment as a file: found by its name, opened, and its header read.

Names: arena "policy" is the POSIX shared-memory object /shmsync.policy.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import posix_ipc

from .. import _native
from ..errors import ArenaNotFound
from .system import close, patient

PREFIX = "/shmsync."
FOLDER = "/dev/shm"


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
    slab_handle: bytes  # by which the memory of a device is opened; else zeros
    manifest_offset: int
    manifest_bytes: int
    fingerprint: int
    crc: int
    covered: bytes  # the bytes that the crc covers


@contextmanager
def opened(name: str) -> Iterator[int | None]:
    """A descriptor of this arena's segment; None when there is none. Raises ArenaNotFound if it may not be opened."""
    try:
        memory = patient(lambda: posix_ipc.SharedMemory(PREFIX + name))
    except posix_ipc.ExistentialError:
        yield None
        return
    except posix_ipc.PermissionsError as error:
        raise ArenaNotFound(
            f"uid {os.geteuid()} may not open arena {name!r}; run the worker as the user of its publisher"
        ) from error
    try:
        yield memory.fd
    finally:
        close(memory.fd)


def read(fd: int) -> Header | None:
    """The header; None when the file is too short to have one."""
    fields: dict[str, Any] | None = _native.read_identity(fd)
    return None if fields is None else Header(**fields)


def stands_for(name: str, fd: int) -> bool:
    """Does the name still stand for the segment behind this descriptor?"""
    try:
        named = os.stat(FOLDER + PREFIX + name)
    except FileNotFoundError:
        return False
    found = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)


def unlink(name: str, fd: int) -> None:
    """Remove the name if it still stands for this segment."""
    if stands_for(name, fd):
        with suppress(FileNotFoundError):
            os.unlink(FOLDER + PREFIX + name)


def locked(fd: int) -> bool:
    """Is the segment's creator still at work? It holds the lock until the segment is ready, or it dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # somebody has it; or the system does not say, which does not mean that nobody has
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
