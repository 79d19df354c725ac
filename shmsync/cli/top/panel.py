"""What `top` draws, with rich: a head, a table cut to the columns that there are, and the keys on the last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.console import Console, Group
from rich.layout import Layout
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...memory.inspection import ArenaSeen, Condition, ReaderSeen
from ..measures import described, holders, slowest
from ..output import duration, per_second, plain, size
from .figures import History, most_lag, sparkline

_COLOURS = {
    Condition.ALIVE: "green",
    Condition.STOPPED: "yellow",
    Condition.DEAD: "red",
    Condition.NOT_READY: "yellow",
    Condition.UNKNOWN: "magenta",
}


class _Column(NamedTuple):
    name: str
    cells: list[Text]
    need: int  # how soon it is left out where there is no room: the largest first; 0: never
    right: bool = True

    @property
    def width(self) -> int:
        return max(len(self.name), *(len(cell) for cell in self.cells)) if self.cells else len(self.name)


class Panel:
    """The picture of one arena, or of all, on the second screen of the terminal while `live` is entered.

    Args:
        history: the looks so far.
        name: of the arena; None: all.
        interval: seconds between two looks.
        sort: the order of the rows, which keys change.
    """

    def __init__(self, history: History, name: str | None, interval: float, sort: str) -> None:
        self._history, self._name, self._interval = history, name, interval
        self.sort, self.backwards = sort, False
        colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
        console = Console(color_system=colours, highlight=False, markup=False)
        self.live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._ascii_only = console.options.ascii_only

    def show(self) -> None:
        """Draw the newest look, for the size that the terminal has now."""
        # rich prefers COLUMNS and LINES, which some shells export and nothing changes with the terminal.
        found = os.get_terminal_size(sys.stdout.fileno())
        columns, lines = self.live.console.size = (found.columns or 80, found.lines or 24)
        one = None if self._name is None else self._history.arenas[0]
        body = self._all(columns, lines) if one is None else self._one(one, columns, lines)
        keys = Text("q quit, s sort, r reverse", style="dim")
        whole = Layout()
        whole.split_column(Layout(Group(*body)), Layout(keys, size=1))
        self.live.update(whole, refresh=True)

    def _all(self, columns: int, lines: int) -> list[Text | Table]:
        found = self._history.sorted_arenas(self.sort, self.backwards)
        shown = found[:lines]
        table = _table(
            [
                _Column("NAME", [Text(seen.name) for seen in shown], 0, right=False),
                _Column("OWNER", [_condition(seen.owner) for seen in shown], 3, right=False),
                _Column("SIZE", [Text(size(seen.bytes) if seen.readable else "-") for seen in shown], 6),
                _Column("VERSION", [Text(str(seen.version) if seen.readable else "-") for seen in shown], 4),
                _Column("VERS/S", [Text(self._rate(seen)) for seen in shown], 0),
                _Column("", [self._bars(self._history.rates.get(seen.name, ()), 10) for seen in shown], 5),
                _Column("READERS", [Text(str(len(seen.readers)) if seen.readable else "-") for seen in shown], 2),
                _Column("LAG", [Text(str(most_lag(seen)) if seen.readable else "-") for seen in shown], 1),
                _Column("AGE", [Text(duration(seen.age)) for seen in shown], 7),
            ],
            columns,
        )
        return [Text(f"shmsync top: {len(found)} arena{'s' * (len(found) != 1)}, by {self.sort}"), table]

    def _one(self, seen: ArenaSeen, columns: int, lines: int) -> list[Text | Table]:
        head = Text.assemble(seen.name, "  ", _condition(seen.owner), f"  pid {seen.pid}" if seen.pid else "")
        if not seen.readable:
            return [head, Text(plain(seen.why))]
        history = self._history
        now = f"version {seen.version}  {per_second(history.rate_of(seen), self._interval)}/s "
        bars = self._bars(history.rates.get(seen.name, ()), max(4, min(40, columns - len(now))))
        said: list[Text | Table] = [head, Text.assemble(now, bars)]
        if seen.state != "open":
            said.append(Text(seen.state, style="red"))
        if seen.why:
            said.append(Text(plain(seen.why), style="red"))
        front = holders(seen)
        if front:
            others = f", {len(front) - 1} more" if len(front) > 1 else ""
            blocks = f"{described(front[0])} blocks the publisher: {duration(front[0].pin_age)}{others}"
            said.append(Text(blocks, style="bold red"))
        elif (late := slowest(seen)) is not None:
            said.append(Text(f"{described(late)} is furthest behind: {late.lag}", style="yellow"))
        found = history.sorted_readers(seen, self.sort, self.backwards)
        said.append(Text(f"{len(found)} of {seen.max_readers} readers, by {self.sort}"))
        shown, rows = found[:lines], {reader.row for reader in front}
        table = _table(
            [
                _Column("", [Text(">" if reader.row in rows else " ", style="bold red") for reader in shown], 0),
                _Column("WORKER", [Text("-" if r.worker is None else str(r.worker)) for r in shown], 0),
                _Column("PID", [Text(str(reader.pid)) for reader in shown], 4),
                _Column("IS", [_condition(reader.condition) for reader in shown], 1, right=False),
                _Column("ACKED", [Text(str(reader.acked)) for reader in shown], 5),
                _Column("LAG", [Text(str(reader.lag), style="yellow" if reader.lag else "") for reader in shown], 0),
                _Column("", [self._bars(history.lags_of(seen, reader), 10) for reader in shown], 3),
                _Column("PINNED", [Text(_pin(reader)) for reader in shown], 2),
                _Column("READS", [Text(str(reader.reads)) for reader in shown], 6),
                _Column("TORN", [Text(str(reader.torn)) for reader in shown], 7),
                _Column("RETRIES", [Text(str(reader.retries)) for reader in shown], 8),
            ],
            columns,
        )
        return [*said, table]

    def _rate(self, seen: ArenaSeen) -> str:
        found = self._history.rate_of(seen)
        return "-" if found is None else "0" if found == 0 else per_second(found, 1.0)

    def _bars(self, values: Sequence[float], width: int) -> Text:
        return Text(sparkline(values, width, ascii_only=self._ascii_only), style="cyan")


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


def _condition(condition: Condition) -> Text:
    return Text(condition.value, style=_COLOURS[condition])


def _pin(reader: ReaderSeen) -> str:
    return "-" if reader.pinned is None else duration(reader.pin_age)
