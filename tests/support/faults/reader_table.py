"""The reader table of an arena, byte by byte."""

from __future__ import annotations

import os
import struct

from shmsync import _native
from support.processes import segment_path

ROW = 128  # bytes; native/include/shmsync/layout.hpp
OWNER, PIN, ACKED = 0, 8, 16


def rows_offset(identity):
    end = identity.manifest_offset + identity.manifest_bytes
    return (end + 65535) // 65536 * 65536


def write_row(state, offset, content, row=None):
    """Overwrite bytes of a reader row (this worker's own) as a stray pointer would."""
    fd = os.open(segment_path(state.sub.name), os.O_RDWR)
    try:
        start = rows_offset(_native.read_identity(fd)) + ROW * (state.sub._reader.row if row is None else row)
        os.pwrite(fd, content, start + offset)
    finally:
        os.close(fd)


def word(value):
    return struct.pack("<Q", value)
