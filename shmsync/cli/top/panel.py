"""What `top` draws: rich's tables, cut to the columns and lines that there are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...memory.inspection import ArenaSeen, Condition, ReaderSeen
from ..measures import holders, name_of, slowest
from ..output import colours_wanted, plain
from ..words import duration, per_second, size
from .history import History, most_lag, sparkline

_COLOURS = {
    Condition.ALIVE: "green",
    Condition.STOPPED: "yellow",
    Condition.DEAD: "red",
    Condition.NOT_READY: "yellow",
    Condition.UNKNOWN: "magenta",
}


@dataclass
class View:
    """How the user wants to see it."""

    sort: str
    backwards: bool = False
    ascii_only: bool = False


class _Column(NamedTuple):
    name: str
    cells: list[Text]
    need: int  # how soon it is left out where there is no room: the largest first; 0: never
    right: bool = True

    @property
    def width(self) -> int:
        return max(len(self.name), *(len(cell) for cell in self.cells)) if self.cells else len(self.name)


def draw(history: History, name: str | None, view: View, columns: int, lines: int, interval: float) -> list[str]:
    """The lines of one frame, with their colours."""
    if name is None:
        parts: list[Text | Table] = _arenas(history, view, columns, lines)
    else:
        parts = _arena(history, history.arenas[0], view, columns, lines, interval)
    wanted = colours_wanted()
    paper = io.StringIO()
    console = Console(
        file=paper,
        width=columns,
        height=lines,
        force_terminal=wanted,
        no_color=not wanted,
        highlight=False,
        markup=False,
    )
    for part in parts:
        console.print(part, overflow="crop", no_wrap=True, crop=True)
    return paper.getvalue().splitlines()[:lines]


def _arenas(history: History, view: View, columns: int, lines: int) -> list[Text | Table]:
    found = history.sorted_arenas(view.sort, view.backwards)
    head = Text(f"shmsync top: {len(found)} arena{'s' * (len(found) != 1)}, by {view.sort}")
    room = max(1, lines - 3)
    shown = found[:room]
    table = _table(
        [
            _Column("NAME", [Text(seen.name) for seen in shown], 0, right=False),
            _Column("OWNER", [_condition(seen.owner) for seen in shown], 3, right=False),
            _Column("SIZE", [Text(size(seen.bytes) if seen.readable else "-") for seen in shown], 6),
            _Column("VERSION", [Text(str(seen.version) if seen.readable else "-") for seen in shown], 4),
            _Column("VERS/S", [Text(_rate(history, seen)) for seen in shown], 0),
            _Column("", [_bars(history.rates.get(seen.name, ()), 10, view) for seen in shown], 5),
            _Column("READERS", [Text(str(len(seen.readers)) if seen.readable else "-") for seen in shown], 2),
            _Column("LAG", [Text(str(most_lag(seen)) if seen.readable else "-") for seen in shown], 1),
            _Column("AGE", [Text(duration(seen.age)) for seen in shown], 7),
        ],
        columns,
    )
    return [head, table, *_foot(len(found) - len(shown), columns)]


def _arena(
    history: History, seen: ArenaSeen, view: View, columns: int, lines: int, interval: float
) -> list[Text | Table]:
    top = Text.assemble(seen.name, "  ", _condition(seen.owner), f"  pid {seen.pid}" if seen.pid else "")
    if not seen.readable:
        return [top, *(Text(line) for line in _folded(seen.why, columns)), *_foot(0, columns)]
    rates = history.rates.get(seen.name, ())
    now = f"version {seen.version}  {per_second(history.rate_of(seen), interval)}/s "
    said: list[Text] = [top, Text.assemble(now, _bars(rates, max(4, min(40, columns - len(now))), view))]
    if seen.state != "open":
        said.append(Text(seen.state, style="red"))
    said += [Text(line, style=style) for text, style in _trouble(seen) for line in _folded(text, columns)]
    found = history.sorted_readers(seen, view.sort, view.backwards)
    said.append(Text(f"{len(found)} of {seen.max_readers} readers, by {view.sort}"))
    shown = found[: max(1, lines - len(said) - 2)]
    front = {reader.row for reader in holders(seen)}
    table = _table(
        [
            _Column("", [Text(">" if reader.row in front else " ", style="bold red") for reader in shown], 0),
            _Column("WORKER", [Text("-" if r.worker is None else str(r.worker)) for r in shown], 0),
            _Column("PID", [Text(str(reader.pid)) for reader in shown], 4),
            _Column("IS", [_condition(reader.condition) for reader in shown], 1, right=False),
            _Column("ACKED", [Text(str(reader.acked)) for reader in shown], 5),
            _Column("LAG", [Text(str(reader.lag), style="yellow" if reader.lag else "") for reader in shown], 0),
            _Column("", [_bars(history.lags_of(seen, reader), 10, view) for reader in shown], 3),
            _Column("PINNED", [Text(_pin(reader)) for reader in shown], 2),
            _Column("READS", [Text(str(reader.reads)) for reader in shown], 6),
            _Column("TORN", [Text(str(reader.torn)) for reader in shown], 7),
            _Column("RETRIES", [Text(str(reader.retries)) for reader in shown], 8),
        ],
        columns,
    )
    return [*said, table, *_foot(len(found) - len(shown), columns)]


def _trouble(seen: ArenaSeen) -> list[tuple[str, str]]:
    """What is wrong, with its colour."""
    found = [(seen.why, "red")] if seen.why else []
    front = holders(seen)
    if front:
        first = front[0]
        others = f", {len(front) - 1} more" if len(front) > 1 else ""
        held = f"{name_of(first)} (pid {first.pid}){_stopped(first)} holds everybody up: {duration(first.pin_age)}"
        found.append((held + others, "bold red"))
    elif (late := slowest(seen)) is not None:
        found.append((f"{name_of(late)}{_stopped(late)} is furthest behind: {late.lag}", "yellow"))
    return found


def _stopped(reader: ReaderSeen) -> str:
    return ", which is stopped," if reader.condition is Condition.STOPPED else ""


def _table(columns: Sequence[_Column], width: int) -> Table:
    kept = list(columns)
    while sum(column.width + 2 for column in kept) - 2 > width and any(column.need for column in kept):
        kept.remove(max(kept, key=lambda column: column.need))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in kept:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True, overflow="crop")
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*row)
    return table


def _foot(hidden: int, columns: int) -> list[Text]:
    more = f"{hidden} more; " if hidden > 0 else ""
    text = f"{more}q quit, s sort, r reverse"
    return [Text(text[:columns], style="dim")]


def _folded(text: str, columns: int) -> list[str]:
    lines, current = [], ""
    for word in plain(text).split():
        if current and len(current) + 1 + len(word) > columns:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}".strip()
    return [*lines, current] if current else lines


def _condition(condition: Condition) -> Text:
    return Text(condition.value, style=_COLOURS[condition])


def _rate(history: History, seen: ArenaSeen) -> str:
    found = history.rate_of(seen)
    return "-" if found is None else "0" if found == 0 else per_second(found, 1.0)


def _bars(values: Sequence[float], width: int, view: View) -> Text:
    return Text(sparkline(values, width, ascii_only=view.ascii_only), style="cyan")


def _pin(reader: ReaderSeen) -> str:
    return "-" if reader.pinned is None else duration(reader.pin_age)
