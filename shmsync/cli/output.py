"""What the commands write: numbers as people read them, and text and tables that fit where they go."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.deadlines import check_seconds

Commands = Any  # what argparse's add_subparsers() returns; it has no public name


def command(commands: Commands, name: str, what: str, examples: str) -> argparse.ArgumentParser:
    """A new command, whose --help ends with examples."""
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def seconds(least: float = 0, most: float = 3600) -> Callable[[str], float]:
    """The type of an argument that is a time, from so many seconds to so many."""

    def parse(text: str) -> float:
        try:
            value = check_seconds("it", float(text), "inf is without limit")
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most} seconds")
        return value

    return parse


class Page:
    """Text for standard output. What its encoding lacks is written as escapes, so no name or command line fails."""

    def __init__(self) -> None:
        self._encoding = sys.stdout.encoding or "utf-8"
        try:
            self.width = os.get_terminal_size(sys.stdout.fileno()).columns or None
        except (OSError, ValueError):
            self.width = None  # no terminal: lines may be as long as they are

    def shows(self, text: str) -> bool:
        """Has its encoding these characters?"""
        try:
            text.encode(self._encoding)
        except UnicodeEncodeError:
            return False
        return True

    def line(self, text: str = "") -> None:
        """Write a line."""
        text = plain(text)
        print(text.encode(self._encoding, "backslashreplace").decode(self._encoding))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], indent: str = "") -> None:
        """Columns under a head; one block for each row where the table is wider than the terminal.

        `right`: the columns that are aligned to the right.
        """
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        if self.width is not None and len(indent) + sum(widths[:-1]) + 2 * len(widths) + 4 > self.width:
            self._blocks(head, rows, indent)
            return
        for row in [head, *rows]:
            cells = [
                cell.rjust(size) if i in right else cell.ljust(size)
                for i, (cell, size) in enumerate(zip(row, widths, strict=True))
            ]
            self.line(self.cut(indent + "  ".join(cells).rstrip()))

    def _blocks(self, head: Sequence[str], rows: Sequence[Sequence[str]], indent: str) -> None:
        label = max(map(len, head))
        for row in rows:
            self.line(self.cut(f"{indent}{row[0]}" if head[0] == "NAME" else f"{indent}{head[0].lower()} {row[0]}"))
            for name, cell in zip(head[1:], row[1:], strict=True):
                if cell not in ("", "-"):
                    self.line(self.cut(f"{indent}  {name.lower().ljust(label)}  {cell}"))

    def cut(self, text: str) -> str:
        """No more of it than the terminal has columns."""
        if self.width is None or len(text) <= self.width:
            return text
        return text[: max(1, self.width - 1)] + (">" if not self.shows("…") else "…")

    def wrapped(self, text: str, indent: str, first: str | None = None) -> None:
        """A sentence, over as many lines as it needs. `first`: the indent of the first of them."""
        before = indent if first is None else first
        width = self.width or sys.maxsize
        for line in textwrap.wrap(text, width, initial_indent=before, subsequent_indent=indent, break_on_hyphens=False):
            self.line(line)


def plain(text: str) -> str:
    """Without control characters: a command line may hold any, and some of them change the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


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
