"""Has the kernel killed a process for lack of memory? Its counters say how often, not whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def memory_kills(counters: list[Path] | None = None) -> int:
    """How many processes were killed for lack of memory so far, as far as this process may know; it only grows."""
    found = 0
    for file in _counters() if counters is None else counters:
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                found += int(count) if name == "oom_kill" else 0
    return found


def _counters() -> Iterator[Path]:
    yield Path("/proc/vmstat")  # of the machine
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if not controllers:
                yield _CGROUPS / inside / "memory.events"  # version 2
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / inside / "memory.oom_control"
