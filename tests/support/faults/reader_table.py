"""The reader table of an arena, byte by byte."""

from __future__ import annotations

import os
import struct

from support.faults.forged import identity
from support.processes import segment_path

ROW = 128  # bytes; native/include/shmsync/layout.hpp
OWNER, PIN, ACKED = 0, 8, 16


def rows_offset(name):
    found = identity(segment_path(name))
    return (found["manifest_offset"] + found["manifest_bytes"] + 65535) // 65536 * 65536


def write_row(state, offset, content, row=None):
    """Overwrite bytes of a reader row (this worker's own) as a stray pointer would."""
    fd = os.open(segment_path(state.sub.name), os.O_RDWR)
    try:
        start = rows_offset(state.sub.name) + ROW * (state.sub._reader.row if row is None else row)
        os.pwrite(fd, content, start + offset)
    finally:
        os.close(fd)


def word(value):
    return struct.pack("<Q", value)
