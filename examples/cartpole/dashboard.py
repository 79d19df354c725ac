"""Live progress: a screen on a terminal, from 36 x 14 on, a line every few seconds anywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import shmsync

from .figures import Figures
from .fleet import Fleet
from .options import Options

REDRAW = 0.25  # seconds between redraws of the table
LINE = 3.0  # seconds between lines


def micros(seconds: float) -> str:
    """A latency in the unit that suits it."""
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"


def shown(console: Console, text: str) -> str:
    """The text in characters that the console's encoding has."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        for character, instead in {"µ": "u", "–": "-", "×": "x", "≥": ">="}.items():
            text = text.replace(character, instead)
        text = text.encode(console.encoding, "replace").decode(console.encoding)
    return text


class Dashboard:
    """Shows `figures`, the arena's own statistics and the fleet; `tick()` is cheap unless a redraw is due."""

    def __init__(
        self, console: Console, options: Options, figures: Figures, fleet: Fleet, pub: shmsync.Publisher
    ) -> None:
        self.options, self.figures, self.fleet, self.pub = options, figures, fleet, pub
        self._console = console
        # Without a refresh thread: nothing else may hold the interpreter while a step is being published.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next = self._sample = 0.0

    def __enter__(self) -> Dashboard:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(self._screen(), refresh=True)
            self._live.stop()

    def tick(self) -> None:
        """Show the latest figures if it is time."""
        now = time.perf_counter()
        if now >= self._sample:
            self._sample = now + REDRAW
            publish = self.pub.stats().publish
            self.figures.published(publish.count, publish.total)
        if now < self._next:
            return
        if self._live:
            self._next = now + REDRAW
            self._live.update(self._screen(), refresh=True)
        else:
            self._next = now + LINE
            rows = [f"{self.figures.seconds:.0f} s", *(f"{name} {value}" for name, value in self._rows())]
            self._console.print(shown(self._console, ", ".join(rows)), soft_wrap=True, highlight=False)

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

    def _screen(self) -> Table:
        """What fits: the run's figures, the progress to the target, and a row for each actor."""
        width, height = self._console.size
        screen = Table.grid(expand=False)
        lines = [self.options.title, self._progress(width)]
        lines += [f"{name}: {value}" for name, value in (self._rows() if width >= 72 else self._short())]
        actors = self._actors(width)
        room = max(2, height - 1 - len(lines))  # the last line is the cursor's
        if len(actors) > room:
            actors = [*actors[: room - 1], f"and {len(actors) - room + 1} more"]
        for line in [*lines, *actors]:
            screen.add_row(Text(shown(self._console, line)[:width], no_wrap=True))
        return screen

    def _progress(self, width: int) -> str:
        recent, target = self.figures.recent, self.options.target
        mean = sum(recent) / len(recent) if recent else 0.0
        words = f" {mean:.0f} of {target:g}"
        room = min(40, width - len(words) - len("return [] "))
        filled = min(room, int(room * max(0.0, mean) / target)) if target > 0 else room
        return f"return [{'#' * filled}{'.' * (room - filled)}]{words}"

    def _short(self) -> list[tuple[str, str]]:
        """Where there is little room: the same figures in fewer lines and words."""
        figures, stats = self.figures, self.pub.stats()
        low, mean, high = figures.lag()
        return [
            ("steps", f"{figures.env_steps:,} ({figures.update_rate():,.0f}/s)"),
            ("version", f"{self.pub.version:,}, lag {low}/{mean:.1f}/{high}"),
            ("publish", f"{micros(stats.publish.p50)}, p99 {micros(stats.publish.p99)}"),
        ]

    def _actors(self, width: int) -> list[str]:
        lines = [f"{'actor':>5} {'version':>8} {'lag':>4} {'reads':>8}" + ("  torn  waited" if width >= 72 else "")]
        for each in sorted(self.fleet.actors + self.fleet.ended, key=lambda actor: actor.worker):
            lost = next((lost for lost in self.fleet.lost if lost.worker == each.worker), None)
            if each.last is None or lost is not None:
                lines.append(f"{each.worker:>5} {'starting' if lost is None else f'lost: exit code {lost.exitcode}'}")
                continue
            stats = each.last.stats
            more = f"  {stats.torn:>4}  {micros(stats.wait.total)}" if width >= 72 else ""
            lag = max(0, self.pub.version - stats.version)
            lines.append(f"{each.worker:>5} {stats.version:>8,} {lag:>4} {stats.reads:>8,}{more}")
        return lines
