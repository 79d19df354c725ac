"""How much memory this process may still take.

A memfd knows no limit of /dev/shm: too large a one is not an error but an out-of-memory kill, later, of somebody.
So the room is compared with the machine's available memory and with every cgroup above this process, beforehand.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def available_bytes(*, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken now: the least of the machine and of each enclosing cgroup (v1 or v2)."""
    return min([psutil.virtual_memory().available, *_cgroup_room(proc, root)])


def _cgroup_room(proc: Path, root: Path) -> list[int]:
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    room: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            room += _walk(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            room += _walk(root / "memory", path, *names)
    return room


def _walk(root: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[int]:
    room = []
    folder = root / path.lstrip("/")
    # In a container the path may be the host's and absent here; the limit then stands at the mount's root.
    for level in [folder, *folder.parents]:
        room_here = _room(level, limit_name, usage_name, reclaimable)
        if room_here is not None:
            room.append(room_here)
        if level == root:
            break
    return room


def _room(folder: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        limit_text = (folder / limit_name).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return None
        usage = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The page cache of files is given back before anything is killed.
    return max(0, int(limit_text) - usage + int(statistics.get(reclaimable, 0)))
