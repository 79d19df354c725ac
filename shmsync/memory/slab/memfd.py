"""Memfds: memory without a name, which other processes open through /proc and which its seals protect.

A memfd disappears with its last mapping, so it cannot be left behind. Its maker keeps a descriptor; a reader opens it
by the pid of the maker and the number of the descriptor. So nothing but a few numbers has to travel, a plain reader of
the pipe need not know descriptors, and none can be lost on the way. The slab of an arena (slab.py) is one. A `Sealed`
carries weights beside a message.

The mapping of a storage belongs to torch, so the tensors over it are real shared tensors, and it lives exactly as long
as the last of them; it keeps no descriptor. For a read-only mapping torch first maps a dummy file of equal size; then
the memfd is mapped over it.

Functions that call torch import it themselves: the command line takes what lies in slab.py without torch.

INV: a reader trusts nothing before it has seen the seals, the size, the inode and the token that it was told.
INV: no process resizes one, and no process writes into a Sealed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from ... import _native
from ...errors import ArenaCorrupt, ShmSyncError, WriterDied
from ..system.calls import close, refusals
from ..system.process import me, owner_word, pid_of
from .available import refuse_too_large

if TYPE_CHECKING:
    import torch

SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10
TOKEN = 16  # bytes at the end, by which a reader knows it

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | SEAL_WRITE  # of weights beside a message
_ALIGNMENT = 64  # bytes
_AT_ONCE = 64 << 20  # bytes of one write, so that an interrupt is noticed
_MADV_POPULATE_READ = 22  # since Linux 5.14


class MemfdAt(NamedTuple):
    """What a reader needs to open it."""

    owner: int  # of the process that has the descriptor
    fd: int
    inode: int
    size: int
    token: bytes


def add_seals(fd: int, seals: int) -> None:
    """Forbid what these seals forbid, in every process."""
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)


def seals_of(fd: int) -> int:
    """The seals of a file; 0 for one that cannot be sealed."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise


class Sealed:
    """Pieces of bytes that no process can change, in a memfd. Raises NoSpace.

    It goes when this object is gone and no process maps it any more.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.spans: list[tuple[int, int]] = []
        size = 0
        for piece in pieces:
            begin = -(-size // _ALIGNMENT) * _ALIGNMENT
            size = begin + piece.nbytes
            self.spans.append((begin, size))
        whole, token = size + TOKEN, os.urandom(TOKEN)
        refuse_too_large(whole, "weights to send", "free some, or send fewer weights or a smaller dtype")
        with refusals("making room for weights"):
            fd = os.memfd_create("shmsync-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._closing = weakref.finalize(self, close, fd)
            self._closing.atexit = False
            _kept.add(self)
            try:
                for (begin, _), piece in zip(self.spans, pieces, strict=True):
                    _write(fd, piece, begin)
                os.pwrite(fd, token, size)
                add_seals(fd, _SEALS)
                self.place = MemfdAt(me().owner, fd, os.fstat(fd).st_ino, whole, token)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Give it up: no process can open it any more. Idempotent."""
        self._closing()


_kept: weakref.WeakSet[Sealed] = weakref.WeakSet()  # of this process


def _forget_all() -> None:
    for each in list(_kept):
        each.close()


os.register_at_fork(after_in_child=_forget_all)  # else a child would keep its parent's weights as long as it lives


def reachable(owner: int) -> bool:
    """Can this process open what that one has? Not across users and containers."""
    try:
        os.listdir(f"/proc/{pid_of(owner)}/fd")
        return bool(_native.may_be_same_owner(owner_word(pid_of(owner)), owner))
    except (OSError, ValueError):
        return False


@contextmanager
def opened_at(place: MemfdAt, seals: int, what: str, gone: Callable[[OSError | None], ShmSyncError]) -> Iterator[int]:
    """Open the memory at `place`, if it is the announced one and has at least these seals; yields a descriptor.

    `what`: its name in errors. Raises ArenaCorrupt if seals or size differ from the announced ones, NoSpace, and the
    error that `gone` returns if the memory is gone or may not be opened; `gone` gets the OSError, or None.
    """
    maker = pid_of(place.owner)
    with refusals(f"opening {what}"):
        try:
            fd = os.open(f"/proc/{maker}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
            raise gone(error) from error
    try:
        status = os.fstat(fd)
        if status.st_ino != place.inode:  # the descriptor's number was used again
            raise gone(None)
        found = seals_of(fd)
        if found & seals != seals or status.st_size != place.size or place.size < TOKEN:
            raise ArenaCorrupt(
                f"{what} of pid {maker} has seals {found:#x} and {status.st_size:,} bytes, but {seals:#x} and "
                f"{place.size:,} were announced; run the same version of shmsync on both sides"
            )
        if os.pread(fd, len(place.token), place.size - TOKEN) != place.token:
            raise gone(None)
        yield fd
    finally:
        close(fd)


def pieces_at(place: MemfdAt, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The pieces that lie there: views of one private mapping, which their reader may change for itself.

    Raises WriterDied when the maker is gone or has given them up, ArenaCorrupt for what is not as it was told, NoSpace.
    """

    def gone(error: OSError | None) -> WriterDied:
        return WriterDied(
            f"the sender (pid {pid_of(place.owner)}) has died, or has given these weights up, before they were read; "
            "they come again with its next send"
        )

    with opened_at(place, _SEALS, "the memory of weights", gone) as fd:
        end = place.size - TOKEN
        before = 0
        for begin, until in spans:
            if not before <= begin <= until <= end:
                raise ArenaCorrupt(f"a piece of the weights is at {begin:,} to {until:,} of {end:,} bytes")
            before = until
        with refusals("mapping the weights of the sender"):
            mapping = mmap.mmap(fd, place.size, access=mmap.ACCESS_COPY)
    with suppress(OSError, ValueError):  # older kernels bring the pages in one by one
        mapping.madvise(_MADV_POPULATE_READ)
    whole = memoryview(mapping)
    return [whole[begin:until] for begin, until in spans]


def _write(fd: int, piece: memoryview, at: int) -> None:
    done = 0
    while done < piece.nbytes:
        done += os.pwrite(fd, piece[done : done + _AT_ONCE], at + done)


def map_shared(fd: int, size: int) -> torch.UntypedStorage:
    """A storage over a writable mapping of `fd`."""
    import torch

    next_free = os.dup(fd)
    close(next_free)
    try:
        return cast("torch.UntypedStorage", torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size))
    except RuntimeError as error:
        # torch leaves the file open when it cannot map it. Nothing else of this process has this one open yet.
        with suppress(OSError):
            if os.path.sameopenfile(next_free, fd):
                close(next_free)
        mmap.mmap(fd, size).close()  # raises the system's own error
        raise OSError(errno.ENOMEM, str(error)) from error


def map_readonly(fd: int, size: int) -> torch.UntypedStorage:
    """A storage over a read-only mapping of `fd`."""
    dummy = os.memfd_create("shmsync-dummy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(dummy, size)
        storage = map_shared(dummy, size)
    finally:
        close(dummy)
    _native.map_readonly_over(storage.data_ptr(), size, fd)
    return storage
