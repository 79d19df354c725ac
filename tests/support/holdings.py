"""What processes hold: memory, descriptors, threads, mappings, segments."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

from support.processes import descriptors


def slab_fds(pid="self"):
    return [fd for fd, target in descriptors(pid).items() if "memfd:shmsync" in target]


def slab_inodes(pid):
    return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in slab_fds(pid)}


def holders(inode):
    """Processes that map this memfd, or have it open."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            maps = Path(f"/proc/{entry}/maps").read_text()
            if re.search(rf" {inode} +/memfd:shmsync", maps) or inode in slab_inodes(entry):
                found.add(int(entry))
        except (OSError, ValueError):
            pass
    return found


def mapping_at(address):
    """(permissions, inode, path) of the memory at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return permissions, int(inode), path[0] if path else ""
    raise LookupError(hex(address))


def sealed_here(state=None):
    """Of sealed weights: how many descriptors this process has, and how many mappings."""
    gc.collect()
    places = descriptors().values(), Path("/proc/self/maps").read_text().splitlines()
    return tuple(sum("shmsync-weights" in each for each in place) for place in places)
