"""The slab: the memfd, or the memory of a device, that holds the weights of an arena.

INV: after create() no process can map the slab writable, unprotect a mapping of it, write() to it, or resize it; the
     one writable mapping is the publisher's, and a forked child finds a read-only one in its place.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ... import _native
from ...errors import ArenaCorrupt, ArenaNotFound, NoSpace, WriterDied
from ..system.calls import close
from ..system.process import Peer, pid_of
from . import memfd
from .available import refuse_too_large

if TYPE_CHECKING:
    import torch

    from ..devices import Device

SLOT_ALIGNMENT = 2 << 20  # bytes; one huge page
TENSOR_ALIGNMENT = 256  # bytes
STAMP_BYTES = 4096  # the session id stands at the end, on a separate page

_SEALS = memfd.SEAL_SHRINK | memfd.SEAL_GROW | memfd.SEAL_FUTURE_WRITE

_NAME_BYTES = 249  # of a memfd's name that Linux allows


class Slab(NamedTuple):
    """A mapped slab. `writable` is None in a subscriber."""

    readonly: torch.UntypedStorage
    writable: torch.UntypedStorage | None
    fd: int  # by which subscribers open it; -1 in a subscriber
    inode: int


def slab_bytes(slots: int, slot_bytes: int) -> int:
    """Size of the memfd in bytes."""
    return slots * slot_bytes + STAMP_BYTES


def create(slots: int, slot_bytes: int, session: bytes, name: str) -> Slab:
    """Make, fill and seal a slab. Raises NoSpace, before it allocates anything, when memory does not suffice.

    `name`: its arena's, by which /proc/<pid>/maps and lsof show it, and for what is said of a fault in it.
    """
    needed = slab_bytes(slots, slot_bytes)
    cure = "use fewer slots, a smaller dtype=, or exclude= what workers do not need"
    available = refuse_too_large(needed, f"{slots} slot(s) of {slot_bytes:,} bytes", cure)
    file = _File(os.memfd_create(f"shmsync:{name}"[:_NAME_BYTES], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    fd = file.fd
    with ExitStack() as undo:
        undo.callback(file.close)
        try:
            os.posix_fallocate(fd, 0, needed)
        except OSError as error:
            raise NoSpace(
                f"the system refused {needed:,} bytes for the slab, though {available:,} seemed available: "
                f"{error.strerror}; free memory, or use fewer slots or a smaller dtype="
            ) from error
        os.pwrite(fd, session, needed - STAMP_BYTES)
        memfd.add_seals(fd, memfd.SEAL_SHRINK | memfd.SEAL_GROW)
        writable = memfd.map_shared(fd, needed)
        _native.populate(writable.data_ptr(), needed)
        memfd.add_seals(fd, memfd.SEAL_FUTURE_WRITE | memfd.SEAL_SEAL)
        slab = Slab(memfd.map_readonly(fd, needed), writable, fd, os.fstat(fd).st_ino)
        # Read-only in forked children, as long as the mapping lives: tensors kept from update() outlive close().
        address = writable.data_ptr()
        let_go = weakref.finalize(writable, _let_go, address, file)  # before it is protected: an interrupt may come
        let_go.atexit = False
        undo.callback(let_go)
        _native.protect_in_children(address, needed, fd)
        undo.pop_all()
        for storage in (slab.readonly, writable):
            _explain_faults(storage, needed, name)
        return slab


class _File:
    """An open file that is closed once, wherever an interrupt comes: by close(), or when this object is gone."""

    fd = -1

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:  # not by a function of ours: an interrupt could come at its beginning
                os.close(fd)
            except OSError:  # Linux has closed it even so
                pass

    __del__ = close


def _let_go(address: int, file: _File) -> None:
    _native.unprotect_in_children(address)
    file.close()


def beside(device: Device, size: int) -> Slab:
    """A slab that lies on a device. Its descriptor is of an empty file, which is there as long as this program runs."""
    fd = os.memfd_create("shmsync-owner", os.MFD_CLOEXEC)
    try:
        inode = os.fstat(fd).st_ino
        storage = device.allocate(size)
    except BaseException:
        close(fd)
        raise
    return Slab(storage, storage, fd, inode)


def attach(owner: int, fd: int, inode: int, expected_bytes: int, session: bytes, name: str) -> Slab:
    """Map the slab of a live publisher read-only, after checking that it is the one its header describes.

    `name`: its arena's, for what is said of a fault in it.
    """
    place = memfd.MemfdAt(owner, fd, inode, expected_bytes, b"")
    with memfd.opened_at(place, _SEALS, f"the slab of arena {name!r}", partial(_gone, owner)) as opened:
        if (uid := os.fstat(opened).st_uid) != os.getuid() and os.getuid() != 0:
            raise ArenaNotFound(
                f"the slab of arena {name!r} belongs to uid {uid} but this is uid {os.getuid()}; run both sides as one "
                "user"
            )
        stamp = os.pread(opened, len(session), expected_bytes - STAMP_BYTES)
        if stamp != session:
            raise ArenaCorrupt(
                f"the slab of arena {name!r} has session {stamp.hex()} but the header says {session.hex()}; restart "
                "the publisher, and attach again"
            )
        slab = Slab(memfd.map_readonly(opened, expected_bytes), None, -1, inode)
        _explain_faults(slab.readonly, expected_bytes, name)
        return slab


def _gone(owner: int, error: OSError | None) -> WriterDied | ArenaNotFound:
    if isinstance(error, PermissionError):
        return ArenaNotFound(
            f"{error.filename} may not be opened by uid {os.getuid()}; run the worker as the user of pid "
            f"{pid_of(owner)}"
        )
    if not Peer(owner=owner).dead:
        return ArenaNotFound(f"the publisher (pid {pid_of(owner)}) has closed this arena; attach to its new one")
    return WriterDied(f"the publisher (pid {pid_of(owner)}) is gone, and its weights with it; restart it")


_mapped: dict[int, int] = {}  # where mappings of slabs of the host begin and end, those of closed arenas too


def is_mapped(address: int) -> bool:
    """Does it lie in a mapping of a slab?"""
    return any(begin <= address < end for begin, end in _mapped.copy().items())


def _explain_faults(storage: torch.UntypedStorage, size: int, name: str) -> None:
    """Let a write where it may not be say so before the process dies of it, for as long as the mapping lives."""
    address = storage.data_ptr()
    weakref.finalize(storage, _native.unwatch_faults, address).atexit = False
    _native.watch_faults(address, size, name)
    _mapped[address] = address + size
    weakref.finalize(storage, _mapped.pop, address, None).atexit = False
