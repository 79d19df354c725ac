"""Has the kernel killed a process for lack of memory? Its counter says how often, not whom."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/vmstat")  # of the machine; kills at the limit of a cgroup count there too


def memory_kills(counters: Path = _COUNTERS) -> int:
    """How many processes were killed for lack of memory so far, as far as this process may know; it only grows."""
    try:
        found = dict(line.split() for line in counters.read_text().splitlines())
        return int(found.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
