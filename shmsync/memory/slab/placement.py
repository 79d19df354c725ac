"""On which NUMA nodes the pages of a slab lie: where its publisher runs, or one after the other on all of them.

The environment variable SHMSYNC_PLACEMENT chooses, at each new arena:

- `first-touch`, or nothing: the kernel puts the pages where it puts everything of this thread, which is the node on
  which it runs unless numactl or a cpuset says otherwise.
- `interleave`: page by page on all nodes that this process may use. On a machine with one node nothing changes.

docs/adr/0033-placement-on-nodes.md says why.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress

VARIABLE = "SHMSYNC_PLACEMENT"
_SETTINGS = ("first-touch", "interleave")

_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call; glibc has no name for it
_MPOL_INTERLEAVE = 3

_log = logging.getLogger("shmsync")


def allocate(fd: int, size: int) -> None:
    """Give a new memfd its size and its pages, on the nodes that the setting asks for.

    Raises ValueError for a setting that does not exist, before anything is changed, and OSError without room.
    """
    setting = os.environ.get(VARIABLE) or _SETTINGS[0]
    if setting not in _SETTINGS:
        raise ValueError(
            f"the environment variable {VARIABLE} is {setting!r}, but can be {' or '.join(map(repr, _SETTINGS))}; "
            "change it, or unset it"
        )
    nodes = nodes_with_memory() if setting == "interleave" else []
    if len(nodes) > 1:
        interleave(fd, size, nodes)
    os.posix_fallocate(fd, 0, size)


def nodes_with_memory() -> list[int]:
    """The nodes whose memory this process may use. [0] where the system does not tell."""
    allowed = _listed("/proc/self/status", r"^Mems_allowed_list:\s*(\S+)")
    having = _listed("/sys/devices/system/node/has_memory", r"^(\S+)")
    return sorted(allowed & having if allowed and having else allowed or having) or [0]


def interleave(fd: int, size: int, nodes: Sequence[int]) -> bool:
    """Have the pages of this memfd lie on these nodes by turns, from the moment when it gets them.

    The kernel keeps this with the file, so it holds whichever process allocates the pages. Where the system
    refuses: False, and one line in the log; the pages then lie where they would without it.
    """
    call = _MBIND.get(platform.machine())
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapping:  # to name the file's pages by; no page is touched
        word = ctypes.c_char.from_buffer(mapping)
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (max(nodes) // bits + 1))()
        for node in nodes:
            mask[node // bits] |= 1 << node % bits
        # The kernel subtracts one from the number of bits that it gets.
        arguments = (ctypes.addressof(word), size, _MPOL_INTERLEAVE, ctypes.addressof(mask), len(mask) * bits + 1, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        done = call is not None and libc.syscall(ctypes.c_long(call), *map(ctypes.c_ulong, arguments)) == 0
        why = os.strerror(ctypes.get_errno()) if call is not None else f"unknown on {platform.machine()}"
        del word  # it holds the mapping
    if not done:
        _log.warning("%s=interleave was not followed, the system refused it: %s", VARIABLE, why)
    return done


def _listed(path: str, pattern: str) -> set[int]:
    """The numbers of a list such as 0-1,4 in a file of the kernel's; none if it is not there."""
    numbers: set[int] = set()
    with suppress(OSError), open(path) as file:
        found = re.search(pattern, file.read(), re.MULTILINE)
        for part in found[1].split(",") if found else ():
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
