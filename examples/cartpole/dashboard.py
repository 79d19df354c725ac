"""Live progress: a table on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

import shmsync

from .figures import Figures
from .fleet import Fleet
from .options import Options

REDRAW = 0.25  # seconds between redraws of the table
LINE = 3.0  # seconds between lines


def micros(seconds: float) -> str:
    """A latency in the unit that suits it."""
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"


class Dashboard:
    """Shows `figures`, the arena's own statistics and the fleet; `tick()` is cheap unless a redraw is due."""

    def __init__(
        self, console: Console, options: Options, figures: Figures, fleet: Fleet, pub: shmsync.Publisher
    ) -> None:
        self.options, self.figures, self.fleet, self.pub = options, figures, fleet, pub
        self._console = console
        # Without a refresh thread: nothing else may hold the interpreter while a step is being published.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next = 0.0

    def __enter__(self) -> Dashboard:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def tick(self) -> None:
        """Show the latest figures if it is time."""
        now = time.perf_counter()
        if now < self._next:
            return
        if self._live:
            self._next = now + REDRAW
            self._live.update(self._table(), refresh=True)
        else:
            self._next = now + LINE
            rows = [f"{self.figures.seconds:.0f} s", *(f"{name} {value}" for name, value in self._rows())]
            self._console.print(", ".join(rows), soft_wrap=True, highlight=False)

    def _rows(self) -> list[tuple[str, str]]:
        figures, stats = self.figures, self.pub.stats()
        low, mean, high = figures.lag()
        recent, messages = figures.recent, self.fleet.messages()
        noticed = sum(m.stats.torn - m.torn for m in messages)
        shown = f"{sum(recent) / len(recent):.1f}" if recent else "–"
        state = "alive" if figures.env_steps else "starting"
        actors = f"{len(self.fleet.actors)} of {self.options.workers} {state}"
        actors += "".join(f"; lost {lost}" for lost in self.fleet.lost)
        return [
            ("return", f"{shown} (last {len(recent)} episodes, target {self.options.target:g})"),
            ("env steps", f"{figures.env_steps:,} ({figures.update_rate():,.0f}/s)"),
            ("version", f"{self.pub.version:,}"),
            ("policy lag", f"{low} / {mean:.1f} / {high} versions (min/mean/max)"),
            ("publish", f"{micros(stats.publish.p50)} median, {micros(stats.publish.p99)} p99"),
            ("ack", f"{micros(figures.ack(50))} median, {micros(figures.ack(99))} p99"),
            ("torn reads", f"{sum(m.torn for m in messages)} acted upon, {noticed} repeated"),
            ("actors", actors),
        ]

    def _table(self) -> Table:
        table = Table(title=self.options.title, title_justify="left", show_header=False)
        for name, value in self._rows():
            table.add_row(name, value)
        return table
