"""Numbers as people read them."""

from __future__ import annotations


def size(count: int) -> str:
    """Bytes: 512 B, 1.2 MiB."""
    if count < 1024:
        return f"{count} B"
    number = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Seconds: 12 ms, 3.4 s, 5 min, 2.5 h, 3 days; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def per_second(rate: float | None, measured: float) -> str:
    """Versions in a second, from a look of so many seconds; "-" where there was none."""
    if rate is None:
        return "-"
    if rate == 0:
        return f"<{1 / measured:.2g}"
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.2g}" if rate < 10 else f"{rate:.1f}"
