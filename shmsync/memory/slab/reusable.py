"""Memory that its maker writes again and again, and that other processes of this machine may map to read.

A memfd of a fixed size, found through /proc as a slab is. Fresh memory costs several times as much as a copy into it,
so what is written often stays where it is, and who reads it often keeps the mapping.

INV: only its maker can write into it or resize it. When a reader may read is between the two.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from ... import _native
from ...errors import NoSpace
from ..system.calls import close, refusals
from ..system.process import me
from .available import available_bytes
from .sealed import TOKEN, SealedAt, opened_at
from .slab import map_readonly

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4 | 0x10  # seal, shrink, grow, future writes

_kept: weakref.WeakSet[Reusable] = weakref.WeakSet()  # of this process


class Reusable:
    """The memory. It goes when neither this object nor `tensor` nor a reader's mapping is left."""

    def __init__(self, size: int) -> None:
        """Make room for `size` bytes. Raises NoSpace."""
        whole = size + TOKEN
        available = available_bytes()
        if whole > available:
            raise NoSpace(f"weights of {size:,} bytes do not fit into the {available:,} bytes that are available")
        token = os.urandom(TOKEN)
        with refusals("making room for weights"):
            fd = os.memfd_create("shmsync-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.posix_fallocate(fd, 0, whole)
                os.pwrite(fd, token, size)
                mapping = mmap.mmap(fd, whole)
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
                inode = os.fstat(fd).st_ino
            except BaseException:
                close(fd)
                raise
        self._closing = weakref.finalize(self, close, fd)
        self._closing.atexit = False
        self.maker = os.getpid()
        self.place = SealedAt(me().owner, fd, inode, whole, token)
        self._mapping = mapping
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=size)
        _native.populate(self.tensor.data_ptr(), size)
        _kept.add(self)

    def split(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Pieces of it, one after the other, each with a storage of its own: torch may send a storage whole."""
        pieces, begin = [], 0
        for size in sizes:
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            piece = torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=begin) if size else empty
            pieces.append(piece)
            begin += size
        return pieces

    def close(self) -> None:
        """No process can open it any more. Idempotent."""
        self._closing()


def map_reusable(place: SealedAt) -> torch.UntypedStorage:
    """Map what lies there, to read only.

    Raises WriterDied when the maker is gone or has given it up, ArenaCorrupt for what is not as it was told, NoSpace.
    """
    with opened_at(place, _SEALS) as fd, refusals("mapping the weights of the sender"):
        storage = map_readonly(fd, place.size)
    address = storage.data_ptr()
    weakref.finalize(storage, _native.unwatch_faults, address).atexit = False
    _native.watch_faults(address, place.size, "weights on their way from a sender")
    return storage


def _forget_all() -> None:
    for each in list(_kept):
        each.close()


os.register_at_fork(after_in_child=_forget_all)  # else a child would keep its parent's memory open to readers
