"""The handle of a slab on a GPU, as it stands in the header of the control segment.

It names the GPU by its UUID, since processes may see the same GPU under different numbers.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from uuid import UUID

from ...errors import ArenaCorrupt
from .calls import HANDLE_SIZE

_MAGIC = b"CUDA"
_VERSION = 1
_LAYOUT = struct.Struct(f"<4sIQ16s{HANDLE_SIZE}s")  # magic, version, bytes of the slab, UUID, CUDA's own handle


class SlabHandle(NamedTuple):
    """What is in it."""

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
