"""Memory of a GPU that shmsync has allocated or opened, and the handles by which it is found again in this process.

CUDA does not open a handle in the process that made it, and the same memory opened twice is one mapping with a count.
So both are looked up here first. A block goes when the last tensor over it is gone, perhaps in the middle of a garbage
collection: what is done there needs no lock that the collecting thread could not have.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from ...errors import ArenaCorrupt
from .calls import HANDLE_SIZE


class Block:
    """Memory of a GPU; its maker is notified of its end.

    Args:
        address: where it begins in this process.
        size: bytes that can be used.
        gone: called with no argument when the last reference is gone. Not at the end of the process, whose memory goes
            with it.
    """

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, address: int, size: int, gone: Callable[[], None]) -> None:
        self.address = address
        self.size = size
        weakref.finalize(self, gone).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes, for torch."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


@dataclass
class _Mapping:
    """Memory of another process that is open in this one."""

    address: int
    users: int = 1
    closed: bool = False


class Blocks:
    """The blocks of one GPU in this process.

    Args:
        close: unmap memory of another process.
    """

    def __init__(self, close: Callable[[int], None]) -> None:
        self._close = close
        self._lock = threading.RLock()  # re-entrant: a block may go while it is held
        self._at: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._own: weakref.WeakValueDictionary[bytes, Block] = weakref.WeakValueDictionary()
        self._open: dict[bytes, _Mapping] = {}

    def at(self, address: int) -> Block | None:
        """The block that begins at this address."""
        return self._at.get(address)

    def add(self, block: Block) -> Block:
        """Let it be found by its address."""
        self._at[block.address] = block
        return block

    def exported(self, handle: bytes, block: Block) -> None:
        """Let it be found by its handle."""
        self._own[handle] = block

    def opened(self, handle: bytes, size: int, open_now: Callable[[], int]) -> Block:
        """The memory of a handle, mapped at most once. `open_now` maps it."""
        with self._lock:
            own = self._own.get(handle)
            if own is not None:
                return own
            mapping = self._open.get(handle)
            if mapping is not None:
                mapping.users += 1  # before the look: a user that goes now must not close it
            if mapping is None or mapping.closed:
                mapping = self._open[handle] = _Mapping(open_now())
            used = mapping
            return self.add(Block(used.address, size, lambda: self._leave(handle, used)))

    def _leave(self, handle: bytes, mapping: _Mapping) -> None:
        with self._lock:
            mapping.users -= 1
            if mapping.users or mapping.closed:
                return
            mapping.closed = True
            if self._open.get(handle) is mapping:
                del self._open[handle]
            self._close(mapping.address)


_MAGIC = b"CUDA"
_VERSION = 1
_LAYOUT = struct.Struct(f"<4sIQ16s{HANDLE_SIZE}s")  # magic, version, bytes of the slab, UUID, CUDA's own handle


class SlabHandle(NamedTuple):
    """The handle of a slab, as it stands in the header of the control segment.

    It names the GPU by its UUID, since processes may see the same GPU under different numbers.
    """

    size: int
    uuid: bytes
    memory: bytes

    def packed(self) -> bytes:
        """As bytes for the header."""
        return _LAYOUT.pack(_MAGIC, _VERSION, *self)


def unpacked(data: bytes) -> SlabHandle:
    """The handle in these bytes. Raises ArenaCorrupt."""
    if len(data) < _LAYOUT.size:
        raise ArenaCorrupt(f"the handle of GPU memory has {len(data)} bytes, not {_LAYOUT.size}")
    magic, version, *rest = _LAYOUT.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ArenaCorrupt(
            f"the handle of GPU memory begins with {magic!r}, version {version}, not {_MAGIC!r}, version {_VERSION}; "
            "trainer and workers must run the same shmsync version"
        )
    return SlabHandle(*rest)


def named(uuid: bytes) -> str:
    """A UUID as nvidia-smi writes it."""
    return f"GPU-{UUID(bytes=uuid)}"
