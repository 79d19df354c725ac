"""A row of the table that `make bench` prints: ours beside a floor or a peer, an aim, and what was checked.

A row has figures and a check, or says in `trouble` why it has none. The first figure is the median, the second the 99th
percentile of times, or the slowest turn of a rate.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

Pair = tuple[float, float]
OK = "ok"
NO_BYTES = "no bytes move"
MISSING, LEFT_OUT, FAILED = "not installed", "left out", "failed"  # how `trouble` begins
AIM = re.compile(r"(?P<p99>p99 )?(?P<least>>= )?(?P<more>\+ )?(?P<value>[\d.]+) (?P<unit>x|us|ms)$")


@dataclasses.dataclass
class Row:
    what: str
    ours: Pair | None = None
    floor: str = ""  # what is beside us
    theirs: Pair | None = None
    aim: str = ""  # "1.4 x": at most 1.4 times theirs; ">= 1 x"; "0.3 us"; "+ 15 us" beyond theirs; "p99 100 ms"
    check: str = ""  # OK, or why nothing could be checked
    unit: str = "us"
    trouble: str = ""
    section: str = ""

    @property
    def ratio(self) -> Pair | None:
        if self.ours is None or self.theirs is None or 0 in self.theirs:
            return None
        return self.ours[0] / self.theirs[0], self.ours[1] / self.theirs[1]

    @property
    def met(self) -> bool | None:
        """Whether the row meets its aim; None: there is no aim that a number could meet."""
        found = [verdict for part in self.aim.split(", ") if (verdict := self._meets(part)) is not None]
        return all(found) if found else None

    @property
    def is_bad(self) -> bool:
        """Did the row fail, have wrong bytes, or go unchecked?"""
        return (
            self.trouble.startswith(FAILED) or (not self.trouble and not self.check) or self.check.startswith("WRONG")
        )

    def _meets(self, part: str) -> bool | None:
        aim = AIM.match(part.strip())
        if aim is None or self.ours is None:
            return None
        which = 1 if aim["p99"] else 0
        value, found = float(aim["value"]) * (1e3 if aim["unit"] == "ms" else 1), self.ours[which]
        if aim["unit"] == "x" or aim["more"]:
            if self.theirs is None:
                return None
            found = found - self.theirs[which] if aim["more"] else found / self.theirs[which]
        return found >= value if aim["least"] else found <= value

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"ratio": self.ratio, "met": self.met}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Row:
        names = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return cls(**{name: value for name, value in values.items() if name in names})


def times(seconds: Pair) -> Pair:
    """In microseconds."""
    return seconds[0] * 1e6, seconds[1] * 1e6


def figures(pair: Pair | None, unit: str) -> str:
    if pair is None:
        return ""
    if unit == "us":
        scale, unit = next(
            (s, u) for s, u in ((1e6, "s"), (1e3, "ms"), (1, "µs"), (1e-3, "ns")) if pair[0] >= s or s < 1
        )
        pair = pair[0] / scale, pair[1] / scale
    first, second = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in pair)
    return f"{first} {unit}" if first == second else f"{first} / {second} {unit}"


def cells(row: Row) -> list[str]:
    """The cells of one line: what, ours, floor or peer, ratio, aim, checked."""
    aim = row.aim.replace(" us", " µs")
    if row.trouble:
        return [row.what, row.trouble, row.floor, "", aim, ""]
    ratio = "" if row.ratio is None else f"{row.ratio[0]:.2f} / {row.ratio[1]:.2f}"
    if row.met is False:
        ratio, missed = (f"**{ratio}**", "") if ratio else ("", "**missed:** ")
        return [*_named(row), ratio, missed + aim, row.check]
    return [*_named(row), ratio, aim, row.check]


def line(row: Row) -> str:
    """The line that is printed as soon as the row is known."""
    return "  ".join(cell for cell in cells(row) if cell)


def _named(row: Row) -> list[str]:
    beside = figures(row.theirs, row.unit)
    return [
        row.what,
        figures(row.ours, row.unit),
        f"{row.floor}: {beside}" if row.floor and beside else beside or row.floor,
    ]
