"""Control segments with words that no publisher writes. Crc and fingerprint are right, so nothing else refuses them."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from support.processes import segment_path

IDENTITY = struct.Struct("<QIIQ16sQ16sQIIQIiQQQQII80s40s")
FIELDS = (
    "magic", "abi", "endian", "segment_bytes", "session", "owner", "boot_id", "pid_namespace", "slots", "readers",
    "slot_bytes", "slab_kind", "slab_fd", "slab_inode", "manifest_offset", "manifest_bytes", "fingerprint", "crc",
    "ready", "slab_handle", "pad",
)  # fmt: skip


def packed(fields):
    """The bytes of an identity, with the crc that belongs to them."""
    plain = IDENTITY.pack(*(fields[name] for name in FIELDS))
    return plain[:128] + struct.pack("<I", zlib.crc32(plain[:128] + plain[136:])) + plain[132:]


def identity(path):
    return dict(zip(FIELDS, IDENTITY.unpack(Path(path).read_bytes()[:256]), strict=True))


def forge(name, **words):
    """Change words of an arena's identity."""
    path = segment_path(name)
    write(name, 0, packed({**identity(path), **words}))


def write(name, offset, data):
    with open(segment_path(name), "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)


# ---- the reader table, byte by byte

ROW = 128  # bytes; native/include/shmsync/layout.hpp
OWNER, PIN, ACKED = 0, 8, 16


def rows_offset(name):
    found = identity(segment_path(name))
    return (found["manifest_offset"] + found["manifest_bytes"] + 65535) // 65536 * 65536


def word(value):
    return struct.pack("<Q", value)
