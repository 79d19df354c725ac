"""`shmsync top [NAME]`: a live table, drawn by rich; one line each interval where there is no terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from ..memory.inspection import ArenaSeen, Condition, ReaderSeen, look_at_all
from ..memory.process import Peers
from .listing import look_twice, rate
from .output import duration, per_second, say, size

if TYPE_CHECKING:
    from rich.console import RenderableType

Look = list[tuple[ArenaSeen, float | None]]  # arenas, and their versions per second

_COLOURS = {Condition.ALIVE: "green", Condition.DEAD: "red", Condition.UNKNOWN: "magenta"}  # else yellow


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # on the way out rich gives the terminal back
    looks = _looks(arguments)
    found: Look = next(looks)  # raises for a name that there is not
    with ExitStack() as stack:
        show: Callable[[Look], None] = _write
        if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
            from rich.live import Live

            live = stack.enter_context(Live(screen=True, auto_refresh=False))

            def show(found: Look) -> None:
                live.update(_panel(arguments, found), refresh=True)

        show(found)
        for found in looks:
            show(found)
    if arguments.name is not None and not found:
        say(f"arena {arguments.name} has ended")
    return 0


def _looks(arguments: argparse.Namespace) -> Iterator[Look]:
    """What is there, at each interval. Ends after --count looks, or with the arena: [] then."""
    names = None if arguments.name is None else [arguments.name]
    look_twice(0, arguments.name)
    before: dict[str, ArenaSeen] = {}
    left = arguments.count
    with closing(Peers()) as peers:
        while True:
            found = look_at_all(names, peers)
            yield [(seen, rate(before.get(seen.name), seen)) for seen in found]
            left -= 1
            if left == 0 or (names is not None and not found):
                return
            before = {seen.name: seen for seen in found}
            time.sleep(max(arguments.interval, 0.05))


def holders(seen: ArenaSeen) -> list[ReaderSeen]:
    """The readers that the publisher has to wait for, now or at its next publish; the longest pin first."""
    pinned = [reader for reader in seen.readers if reader.pinned is not None and reader.condition is not Condition.DEAD]
    if len(seen.slots) == 1:
        # For a stopped one the publisher waits with its gate open, so that other readers go on with the old version.
        found = pinned if seen.gated else [reader for reader in pinned if reader.condition is Condition.STOPPED]
    else:
        old = {slot.version for slot in seen.slots if not slot.current and slot.version and not slot.unfinished}
        held = {reader.pinned for reader in pinned}
        free = [slot for slot in seen.slots if not slot.current and (slot.unfinished or slot.version not in held)]
        found = [] if free else [reader for reader in pinned if reader.pinned in old]
    return sorted(found, key=lambda reader: -reader.pin_age)


def most_lag(seen: ArenaSeen) -> int:
    """The lag of the reader that is furthest behind."""
    return max((reader.lag for reader in seen.readers), default=0)


def _slowest(seen: ArenaSeen) -> ReaderSeen | None:
    """The living reader that is furthest behind; None when none is."""
    late = [reader for reader in seen.readers if reader.lag and reader.condition is not Condition.DEAD]
    return max(late, key=lambda reader: (reader.lag, reader.pin_age), default=None)


def _described(reader: ReaderSeen) -> str:
    """How a sentence names a reader: "worker 7 (pid 812, stopped)", "pid 813"."""
    stopped = "stopped" if reader.condition is Condition.STOPPED else ""
    if reader.worker is None:
        return f"pid {reader.pid}" + (stopped and f" ({stopped})")
    return f"worker {reader.worker} (pid {reader.pid}{stopped and ', ' + stopped})"


def _write(found: Look) -> None:
    moment = time.strftime("%H:%M:%S")
    for seen, versions in found:
        parts = [moment, seen.name, seen.owner.value]
        if seen.readable:
            parts += [f"version {seen.version}", f"{_rate(versions)}/s"]
            parts += [f"readers {len(seen.readers)}", f"lag {most_lag(seen)}"]
            if seen.state != "open":
                parts.append(seen.state)
            if front := holders(seen):
                parts.append(f"blocked by {_described(front[0])} for {duration(front[0].pin_age)}")
            elif (late := _slowest(seen)) is not None:
                parts.append(f"last {_described(late)}")
        say(" ".join(parts))
    sys.stdout.flush()


def _panel(arguments: argparse.Namespace, found: Look) -> RenderableType:
    """What rich draws of this look."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def condition(which: Condition) -> Text:
        return Text(which.value, style=_COLOURS.get(which, "yellow"))

    def columns(*names: str) -> Table:
        made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in names:
            left = name in ("NAME", "OWNER", "IS", "BLOCKED BY")
            made.add_column(name, justify="left" if left else "right", no_wrap=True)
        return made

    if arguments.name is None:
        table = columns("NAME", "OWNER", "SIZE", "VERSION", "VERS/S", "READERS", "LAG", "AGE", "BLOCKED BY")
        for seen, versions in found:
            inside = ["-"] * 5
            if seen.readable:
                inside = [size(seen.bytes), str(seen.version), _rate(versions), str(len(seen.readers))]
                inside.append(str(most_lag(seen)))
            by = Text("; ".join(map(_described, holders(seen)[:1])), style="bold red")
            table.add_row(Text(seen.name), condition(seen.owner), *inside, duration(seen.age), by)
        return Group(Text(f"shmsync top: {len(found)} arena{'s' * (len(found) != 1)}"), table)
    if not found:
        return Text("")
    ((seen, versions),) = found
    lines: list[RenderableType] = [
        Text.assemble(seen.name, "  ", condition(seen.owner), f"  pid {seen.pid}" if seen.pid else ""),
        Text(f"version {seen.version}  {_rate(versions)}/s  {len(seen.readers)} of {seen.max_readers} readers"),
    ]
    if seen.why or seen.state not in ("", "open"):
        lines.append(Text(f"{seen.state} {seen.why}".strip(), style="red"))
    front = holders(seen)
    if front:
        others = f", {len(front) - 1} more" if len(front) > 1 else ""
        said = f"{_described(front[0])} blocks the publisher: {duration(front[0].pin_age)}{others}"
        lines.append(Text(said, style="bold red"))
    elif (late := _slowest(seen)) is not None:
        lines.append(Text(f"{_described(late)} is furthest behind: {late.lag}", style="yellow"))
    table = columns("", "WORKER", "PID", "IS", "ACKED", "LAG", "PINNED", "READS", "TORN", "RETRIES")
    blocking = {reader.row for reader in front}
    for reader in sorted(seen.readers, key=lambda each: (each.row not in blocking, -each.lag, -each.pin_age)):
        table.add_row(
            Text(">" if reader.row in blocking else " ", style="bold red"),
            "-" if reader.worker is None else str(reader.worker),
            str(reader.pid),
            condition(reader.condition),
            str(reader.acked),
            Text(str(reader.lag), style="yellow" if reader.lag else ""),
            "-" if reader.pinned is None else duration(reader.pin_age),
            *map(str, (reader.reads, reader.torn, reader.retries)),
        )
    return Group(*lines, table)


def _rate(versions: float | None) -> str:
    return "0" if versions == 0 else per_second(versions, 1.0)
