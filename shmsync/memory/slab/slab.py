"""The slab: the memory that holds the weights. It is a memfd, a file without a name, so it cannot be left behind.

INV: after create() no process can map the slab writable, unprotect a mapping of it, write() to it, or resize it; the
     one writable mapping is the publisher's, and a forked child finds a read-only one in its place.

The mapping belongs to a torch shared-memory storage, so the tensors over it are real shared tensors, and it lives
exactly as long as the last of them. For the read-only mapping torch first maps a dummy file of equal size; then the
slab is mapped over it, and its descriptor replaces the dummy's. This relies on two internals of torch
(`_new_shared_fd_cpu`, `_share_fd_cpu_`), which tests/unit/test_memory.py checks. Where they fail, a plain mmap is used:
equally zero-copy and read-only, but torch does not know that the tensors are shared.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import warnings
import weakref
from contextlib import suppress
from typing import NamedTuple

import torch

from ... import _native
from ...errors import ArenaCorrupt, ArenaNotFound, NoSpace, WriterDied
from ..devices import Device
from ..system.calls import close
from ..system.process import Peers, pid_of
from . import placement
from .available import available_bytes

SLOT_ALIGNMENT = 2 << 20  # bytes; one huge page
TENSOR_ALIGNMENT = 256  # bytes
STAMP_BYTES = 4096  # the session id stands at the end, on a page of its own

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE

_NAME_BYTES = 249  # of a memfd's name that Linux allows

_log = logging.getLogger("shmsync")
_fallback_logged = False


class Slab(NamedTuple):
    """A mapped slab. `writable` is None in a subscriber."""

    readonly: torch.UntypedStorage
    writable: torch.UntypedStorage | None
    fd: int  # of the publisher's storage; -1 in a subscriber
    inode: int
    owns_fd: bool = False  # made by the plain mmap: nothing else closes it


def slab_bytes(slots: int, slot_bytes: int) -> int:
    """Size of the memfd in bytes."""
    return slots * slot_bytes + STAMP_BYTES


def create(slots: int, slot_bytes: int, session: bytes, name: str) -> Slab:
    """Make, fill and seal a slab. Raises NoSpace, before it allocates anything, when memory does not suffice.

    `name`: its arena's, by which /proc/<pid>/maps and lsof show it, and for what is said of a fault in it.
    """
    needed = slab_bytes(slots, slot_bytes)
    available = available_bytes()
    if needed > available:
        raise NoSpace(
            f"{slots} slot(s) of {slot_bytes:,} bytes need {needed:,} bytes but {available:,} are available to this "
            "process (machine and cgroup); use fewer slots, a smaller dtype=, or exclude= what workers do not need"
        )
    fd = os.memfd_create(f"shmsync:{name}"[:_NAME_BYTES], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            placement.allocate(fd, needed)
        except OSError as error:
            raise NoSpace(f"the system refused {needed:,} bytes for the slab: {error.strerror}") from error
        os.pwrite(fd, session, needed - STAMP_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        writable, kept_fd, owns_fd = _map_writable(fd, needed)
        try:
            _native.populate(writable.data_ptr(), needed)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_FUTURE_WRITE | _SEAL_SEAL)
            slab = Slab(map_readonly(fd, needed), writable, kept_fd, os.fstat(fd).st_ino, owns_fd)
            _protect_in_children(slab, needed)
            for storage in (slab.readonly, writable):  # the writable one is read-only in forked children
                _explain_faults(storage, needed, name)
        except BaseException:
            if owns_fd:
                close(kept_fd)
            raise
        return slab
    finally:
        close(fd)


def beside(device: Device, size: int) -> Slab:
    """A slab that lies on a device. Its descriptor is of an empty file, which is there as long as this program runs."""
    fd = os.memfd_create("shmsync-owner", os.MFD_CLOEXEC)
    try:
        inode = os.fstat(fd).st_ino
        storage = device.allocate(size)
    except BaseException:
        close(fd)
        raise
    return Slab(storage, storage, fd, inode, owns_fd=True)


def attach(owner: int, fd: int, inode: int, expected_bytes: int, session: bytes, name: str) -> Slab:
    """Map the slab of a live publisher read-only, after checking that it is the one its header describes.

    `name`: its arena's, for what is said of a fault in it.
    """
    path = f"/proc/{pid_of(owner)}/fd/{fd}"
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _gone(owner) from error
    except PermissionError as error:
        raise ArenaNotFound(
            f"{path} may not be opened by uid {os.getuid()}; run the worker as the user of pid {pid_of(owner)}"
        ) from error
    try:
        status = os.fstat(opened)
        if status.st_ino != inode:  # the descriptor's number was reused
            raise _gone(owner)
        if status.st_size != expected_bytes:
            raise ArenaCorrupt(
                f"the slab of pid {pid_of(owner)} has {status.st_size:,} bytes but its header says {expected_bytes:,}; "
                "both sides must run the same shmsync version"
            )
        if status.st_uid != os.getuid() and os.getuid() != 0:
            raise ArenaNotFound(f"the slab belongs to uid {status.st_uid} but this is uid {os.getuid()}")
        seals = _seals(opened)
        if seals & _SEALS != _SEALS:
            raise ArenaCorrupt(f"the slab has seals {seals:#x} but {_SEALS:#x} are needed; it is not an shmsync slab")
        stamp = os.pread(opened, len(session), expected_bytes - STAMP_BYTES)
        if stamp != session:
            raise ArenaCorrupt(f"the slab carries session {stamp.hex()} but the header says {session.hex()}")
        slab = Slab(map_readonly(opened, expected_bytes), None, -1, inode)
        _explain_faults(slab.readonly, expected_bytes, name)
        return slab
    finally:
        close(opened)


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a file that cannot be sealed
            return 0
        raise


def _gone(owner: int) -> WriterDied | ArenaNotFound:
    peers = Peers()
    try:
        alive = peers.alive(owner)
    finally:
        peers.close()
    if alive:
        return ArenaNotFound(f"the publisher (pid {pid_of(owner)}) has closed this arena; attach to its new one")
    return WriterDied(f"the publisher (pid {pid_of(owner)}) is gone, and its weights with it; restart it")


def release(slab: Slab) -> None:
    """Close what is not memory. The memory itself is freed with the last tensor over it."""
    if slab.owns_fd:
        _native.unprotect_in_children(slab.writable.data_ptr() if slab.writable is not None else 0)
        close(slab.fd)


def _protect_in_children(slab: Slab, size: int) -> None:
    """Map it read-only in forked children, for as long as it lives: tensors kept from update() outlive close()."""
    assert slab.writable is not None
    address = slab.writable.data_ptr()
    weakref.finalize(slab.writable, _native.unprotect_in_children, address).atexit = False
    _native.protect_in_children(address, size, slab.fd)


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


def _map_writable(fd: int, size: int) -> tuple[torch.UntypedStorage, int, bool]:
    try:
        storage = _torch_storage(fd, size)
        kept = storage._share_fd_cpu_()[0]
        os.set_inheritable(kept, False)  # a program that this process runs later must not hold the memory
        return storage, kept, False
    except (AttributeError, RuntimeError, TypeError) as error:
        _log_fallback(error)
        mapping = mmap.mmap(fd, size)
        return _over(mapping), os.dup(fd), True


def _torch_storage(fd: int, size: int) -> torch.UntypedStorage:
    """A storage of torch over a mapping of `fd`; it keeps a duplicate of the descriptor."""
    next_free = os.dup(fd)
    close(next_free)
    try:
        return torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
    except RuntimeError:
        # torch forgets its duplicate when it cannot map it. No other process has this file yet.
        with suppress(OSError):
            if os.path.sameopenfile(next_free, fd):
                close(next_free)
        raise


def map_readonly(fd: int, size: int) -> torch.UntypedStorage:
    """A storage over a read-only mapping of `fd`; keeps one descriptor of its own."""
    try:
        dummy = os.memfd_create("shmsync-dummy", os.MFD_CLOEXEC)
        try:
            os.ftruncate(dummy, size)
            storage = _torch_storage(dummy, size)
        finally:
            close(dummy)
        kept, kept_size = storage._share_fd_cpu_()
        if kept_size != size or os.fstat(kept).st_size != size:
            raise RuntimeError(f"torch keeps a descriptor of {kept_size} bytes for a storage of {size}")
    except (AttributeError, RuntimeError, TypeError) as error:
        _log_fallback(error)
        return _over(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    _native.map_readonly_over(storage.data_ptr(), size, fd)
    os.dup2(fd, kept, inheritable=False)
    return storage


def _over(mapping: mmap.mmap) -> torch.UntypedStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the buffer is not writable", which is intended
        return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()


def _log_fallback(error: BaseException) -> None:
    global _fallback_logged
    if not _fallback_logged:
        _fallback_logged = True
        _log.warning(
            "torch %s does not let shmsync make a shared storage (%s); using a plain mapping: as safe and zero-copy, "
            "but is_shared() is False",
            torch.__version__,
            error,
        )
