"""What the commands write: plain lines, tables, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Refused(Exception):
    """Why a command cannot do what it was asked for, in a sentence."""


def say(text: str = "") -> None:
    """Write a line, without control characters: a command line may hold any, and some of them change the terminal."""
    print("".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Columns under a head; those of the numbers in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = zip(row, widths, strict=True)
        say("  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(cells)).rstrip())


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
