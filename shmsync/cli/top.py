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

from ..memory.inspection import ArenaSeen, look_at_all
from ..memory.process import Peers, ProcessState
from ..memory.segment import ReaderInfo
from . import inspecting, listing
from .output import duration, say

if TYPE_CHECKING:
    from rich.console import RenderableType

Look = list[tuple[ArenaSeen, str]]  # arenas, and their versions per second

_COLOURS = {"live": "green", "stopped": "yellow", "dead": "red", "unknown": "magenta", ">": "bold red"}  # of cells


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
            if found or arguments.name is None:
                show(found)
    if arguments.name is not None and not found:
        say(f"arena {arguments.name} has ended")
    return 0


def _looks(arguments: argparse.Namespace) -> Iterator[Look]:
    """What is there, at each interval. Ends after --count looks, or with the arena: [] then."""
    names = None if arguments.name is None else [arguments.name]
    listing.look(arguments.name)
    before: dict[str, ArenaSeen] = {}
    left = arguments.count
    with closing(Peers()) as peers:
        while True:
            found = look_at_all(names, peers)
            yield [(seen, _rate(before.get(seen.name), seen)) for seen in found]
            left -= 1
            if left == 0 or (names is not None and not found):
                return
            before = {seen.name: seen for seen in found}
            time.sleep(max(arguments.interval, 0.05))


def holders(seen: ArenaSeen) -> list[ReaderInfo]:
    """The readers that the publisher has to wait for, now or at its next publish; the longest pin first."""
    pinned = [reader for reader in seen.readers if reader.pinned is not None and reader.state is not ProcessState.DEAD]
    if len(seen.slots) == 1:
        # For a stopped one the publisher waits with its gate open, so that other readers go on with the old version.
        found = pinned if seen.gated else [reader for reader in pinned if reader.state is ProcessState.STOPPED]
    else:
        old = {slot.version for slot in seen.slots if not slot.current and slot.version and not slot.unfinished}
        held = {reader.pinned for reader in pinned}
        free = [slot for slot in seen.slots if not slot.current and (slot.unfinished or slot.version not in held)]
        found = [] if free else [reader for reader in pinned if reader.pinned in old]
    return sorted(found, key=lambda reader: -reader.pin_age)


def _problem(seen: ArenaSeen) -> str:
    """Which reader blocks the publisher, else which living one is furthest behind; "" for none."""
    if front := holders(seen):
        others = f", {len(front) - 1} more" if len(front) > 1 else ""
        return f"{_described(front[0])} blocks the publisher: {duration(front[0].pin_age)}{others}"
    late = [reader for reader in seen.readers if reader.lag and reader.state is not ProcessState.DEAD]
    slowest = max(late, key=lambda reader: (reader.lag, reader.pin_age), default=None)
    return "" if slowest is None else f"{_described(slowest)} is furthest behind: {slowest.lag}"


def _described(reader: ReaderInfo) -> str:
    """How a sentence names a reader: "worker 7 (pid 812, stopped)", "pid 813"."""
    stopped = "stopped" if reader.state is ProcessState.STOPPED else ""
    if reader.worker is None:
        return f"pid {reader.pid}" + (stopped and f" ({stopped})")
    return f"worker {reader.worker} (pid {reader.pid}{stopped and ', ' + stopped})"


def _figures(seen: ArenaSeen, versions: str) -> list[str]:
    found = [f"{seen.name}  {seen.owner.value}" + (f"  pid {seen.pid}" if seen.pid else "")]
    if seen.readable:
        readers = f"{len(seen.readers)} of {seen.max_readers} readers"
        found.append(f"version {seen.version}  {versions}/s  {readers}")
    return found


def _wrong(seen: ArenaSeen) -> list[str]:
    """What there is to worry about: the state, the owner, a failed worker, and who is waited for."""
    return list(filter(None, (seen.state if seen.state != "open" else "", seen.why, seen.failure, _problem(seen))))


def _write(found: Look) -> None:
    for seen, versions in found:
        say("  ".join([time.strftime("%H:%M:%S"), *_figures(seen, versions), *_wrong(seen)]))
    sys.stdout.flush()


def _panel(arguments: argparse.Namespace, found: Look) -> RenderableType:
    """What rich draws of this look: what is wrong, and one arena's readers, or all arenas."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows: list[list[str]]
    if arguments.name is None:
        said = [f"shmsync top: {len(found)} arena{'s' * (len(found) != 1)}"]
        wrong = [f"{seen.name}: {text}" for seen, _ in found for text in _wrong(seen)]
        head, rows = (*listing.HEAD, "VERS/S"), [[*listing.cells(seen), versions] for seen, versions in found]
    else:
        ((seen, versions),) = found
        said, wrong = _figures(seen, versions), _wrong(seen)
        head = ("", *inspecting.HEAD[:-1])
        front = holders(seen)
        ordered = sorted(seen.readers, key=lambda each: (each not in front, -each.lag, -each.pin_age))
        rows = [[">" if each in front else " ", *inspecting.cells(each)[:-1]] for each in ordered]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name in ("NAME", "OWNER", "IS") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    return Group(*map(Text, said), *(Text(text, style="bold red") for text in wrong), table)


def _rate(before: ArenaSeen | None, after: ArenaSeen) -> str:
    """Versions in a second between two looks at one session; "-" where they tell nothing."""
    if before is None or not after.readable or before.session != after.session or after.at <= before.at:
        return "-"
    if after.owner is not ProcessState.LIVE:
        return "-"
    found = max(0, after.version - before.version) / (after.at - before.at)
    return f"{found:.0f}" if found >= 100 or not found else f"{found:.2g}" if found < 10 else f"{found:.1f}"
