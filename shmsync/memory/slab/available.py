"""How much memory this process may still take.

A memfd is not bound by the size of /dev/shm. One that is too large raises no error; later, the kernel kills a process
for lack of memory. So its size is first compared with the memory that the machine and each enclosing cgroup have left.
"""

from __future__ import annotations

import errno
from pathlib import Path

import psutil

from ...errors import NoSpace

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def available_bytes(*, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated now: the least that the machine and the enclosing cgroups (v1 or v2) have left."""
    return min([psutil.virtual_memory().available, *cgroup_room(proc, root)])


def refuse_too_large(needed: int, what: str, cure: str) -> int:
    """The bytes that are available. Raises NoSpace if `what` needs more of them; `cure`: the next step."""
    available = available_bytes()
    if needed > available:
        raise NoSpace(
            f"{what} need {needed:,} bytes but {available:,} are available to this process (machine and cgroup), and "
            f"nothing was taken; {cure}"
        )
    return available


def cgroup_room(proc: Path, root: Path) -> list[int]:
    """Bytes that each enclosing cgroup with a limit has left."""
    room: list[int] = []
    for line in (_content(proc) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            room += _walk(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            room += _walk(root / "memory", path, *names)
    return room


def _walk(root: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[int]:
    folder = root / path.lstrip("/")
    levels = [folder, *folder.parents]
    # In a container the path may be the host's and absent here; the limit is then at the root of the mount.
    room = [_room(level, limit_name, usage_name, reclaimable) for level in levels[: levels.index(root) + 1]]
    return [found for found in room if found is not None]


def _room(folder: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    limit_text, usage, details = (_content(folder / name) for name in (limit_name, usage_name, "memory.stat"))
    if limit_text is None or usage is None or details is None:
        return None
    try:
        if limit_text.strip() == "max" or int(limit_text) >= _UNLIMITED:
            return None
        statistics = dict(line.split() for line in details.splitlines())
        # The kernel reclaims the page cache of files before it kills anything.
        return max(0, int(limit_text) - int(usage) + int(statistics.get(reclaimable, 0)))
    except ValueError:
        return None


def _content(path: Path) -> str | None:
    """None where there is no such limit, or none that this process may see; OSError if that could not be found out."""
    try:
        return path.read_text()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
            raise
        return None
