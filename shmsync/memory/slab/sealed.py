"""Bytes that one process writes once and others copy from: a memfd that no process can change, found through /proc.

Its maker keeps a descriptor; a reader opens it by the pid of the maker and the number of the descriptor, as a slab is.
So nothing but a few numbers has to travel, a plain reader of the pipe need not know descriptors, and none
can be lost on the way.

INV: a reader trusts nothing before it has seen the seals, the size, the inode and the token that it was told.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ... import _native
from ...errors import ArenaCorrupt, NoSpace, WriterDied
from ..system.calls import close, refusals
from ..system.process import me, owner_word, pid_of
from .available import available_bytes

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # seal, shrink, grow, write
_ALIGNMENT = 64  # bytes
TOKEN = 16  # bytes at the end, by which a reader knows it
_AT_ONCE = 64 << 20  # bytes of one write, so that an interrupt is noticed
_MADV_POPULATE_READ = 22  # since Linux 5.14


_kept: weakref.WeakSet[Sealed] = weakref.WeakSet()  # of this process


class SealedAt(NamedTuple):
    """What a reader needs to open it."""

    owner: int  # of the process that has the descriptor
    fd: int
    inode: int
    size: int
    token: bytes


class Sealed:
    """Pieces of bytes in a sealed memfd. It goes when this object is gone and no reader maps it any more."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        """Write them. Raises NoSpace."""
        self.spans: list[tuple[int, int]] = []
        end = 0
        for piece in pieces:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + piece.nbytes
            self.spans.append((begin, end))
        self._size, self._token = end + TOKEN, os.urandom(TOKEN)
        available = available_bytes()
        if self._size > available:
            raise NoSpace(f"weights of {end:,} bytes do not fit into the {available:,} bytes that are available")
        with refusals("making room for weights"):
            self._fd = os.memfd_create("shmsync-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closing = weakref.finalize(self, close, self._fd)
        self._closing.atexit = False
        _kept.add(self)
        with refusals("making room for weights"):
            for (begin, _), piece in zip(self.spans, pieces, strict=True):
                _write(self._fd, piece, begin)
            _write(self._fd, memoryview(self._token), end)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
            self._inode = os.fstat(self._fd).st_ino

    def close(self) -> None:
        """Give it up: no process can open it any more. Idempotent."""
        self._closing()

    @property
    def place(self) -> SealedAt:
        """Where readers find it."""
        return SealedAt(me().owner, self._fd, self._inode, self._size, self._token)


def reachable(owner: int) -> bool:
    """Can this process open what that one has? Not across users and containers."""
    try:
        os.listdir(f"/proc/{pid_of(owner)}/fd")
        return bool(_native.may_be_same_owner(owner_word(pid_of(owner)), owner))
    except (OSError, ValueError):
        return False


@contextmanager
def opened_at(place: SealedAt, seals: int) -> Iterator[int]:
    """A descriptor of what lies there, when it is what was told, and has these seals at least.

    Raises WriterDied when the maker is gone or has given it up, ArenaCorrupt for what is not as it was told, NoSpace.
    """
    try:
        fd = os.open(f"/proc/{pid_of(place.owner)}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        raise _gone(place) from error
    except OSError:
        with refusals("opening the weights of the sender"):
            raise
    try:
        status = os.fstat(fd)
        if status.st_ino != place.inode:  # the descriptor's number was used again
            raise _gone(place)
        found = 0
        with suppress(OSError):  # a file that cannot be sealed
            found = fcntl.fcntl(fd, _F_GET_SEALS)
        if found & seals != seals or status.st_size != place.size or place.size < TOKEN:
            raise ArenaCorrupt(
                f"the weights of pid {pid_of(place.owner)} have seals {found:#x} and {status.st_size:,} bytes, but "
                f"{seals:#x} and {place.size:,} were announced; run the same version of shmsync on both sides"
            )
        if os.pread(fd, TOKEN, place.size - TOKEN) != place.token:
            raise _gone(place)
        yield fd
    finally:
        close(fd)


def pieces_at(place: SealedAt, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The pieces that lie there: views of one private mapping, which their reader may change for itself.

    Raises WriterDied when the maker is gone or has given them up, ArenaCorrupt for what is not as it was told, NoSpace.
    """
    with opened_at(place, _SEALS) as fd:
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


def _forget_all() -> None:
    for each in list(_kept):
        each.close()


os.register_at_fork(after_in_child=_forget_all)  # else a worker would keep its trainer's weights as long as it lives


def _write(fd: int, piece: memoryview, at: int) -> None:
    done = 0
    while done < piece.nbytes:
        done += os.pwrite(fd, piece[done : done + _AT_ONCE], at + done)


def _gone(place: SealedAt) -> WriterDied:
    return WriterDied(
        f"the sender (pid {pid_of(place.owner)}) has died, or has given these weights up, before they were read; they "
        "come again with its next send"
    )
