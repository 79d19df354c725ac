"""What processes hold: memory, descriptors, threads, mappings, segments."""

from __future__ import annotations

import os
from pathlib import Path

from support.processes import descriptors


def slab_fds(pid="self"):
    return [fd for fd, target in descriptors(pid).items() if "memfd:shmsync" in target]


def slab_inodes(pid):
    return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in slab_fds(pid)}


def mapping_at(address):
    """(permissions, inode, path) of the memory at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return permissions, int(inode), path[0] if path else ""
    raise LookupError(hex(address))
