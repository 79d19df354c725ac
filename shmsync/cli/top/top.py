"""`shmsync top [NAME]`: a live table; one line each interval where there is no terminal to draw on."""

from __future__ import annotations

import argparse
import os
import sys
import time

from ...errors import ArenaNotFound
from ...memory.control import leftovers
from ..measures import holders, name_of, slowest
from ..output import Commands, Page, command, seconds
from ..words import duration, per_second
from .history import ARENA_SORTS, READER_SORTS, History, most_lag
from .screen import EndedBySignal, Screen, Signals

_EXAMPLES = """
shmsync top                                  all arenas
shmsync top policy                           one, with its readers; whoever holds everybody up is in front
shmsync top policy --sort lag --interval 0.2
shmsync top policy | tee lag.log             one line a second
"""
_KEYS = "keys: q quit, s sort by the next column, r reverse"


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "top", "watch arenas and their readers (on a terminal: needs shmsync[top])", _EXAMPLES)
    made.description = f"{made.description} {_KEYS}."
    made.add_argument("name", nargs="?", metavar="NAME", help="one arena, with its readers")
    made.add_argument("--interval", type=seconds(0.05), default=1.0, metavar="S", help="seconds between two looks (1)")
    made.add_argument("--count", type=_count, metavar="N", help="end after so many looks")
    made.add_argument(
        "--sort", choices=sorted({*ARENA_SORTS, *READER_SORTS}), help="holding or name, at first, or this"
    )
    made.set_defaults(run=_run)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of looks; give 1 or more")
    return value


def _run(arguments: argparse.Namespace) -> int:
    sorts = ARENA_SORTS if arguments.name is None else READER_SORTS
    sort = arguments.sort or sorts[0]
    if sort not in sorts:
        what = "arenas are" if arguments.name is None else "readers are"
        print(f"shmsync top: {what} sorted by {', '.join(sorts)}, not by {sort}", file=sys.stderr)
        return 2
    drawn = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    history = History(None if arguments.name is None else [arguments.name])
    try:
        with Signals():
            _first(history, arguments.name)
            if drawn:
                return _draw(history, arguments, sort, sorts)
            return _write(history, arguments)
    except EndedBySignal as ended:
        return ended.status
    finally:
        history.close()


def _first(history: History, name: str | None) -> None:
    history.look()
    if name is not None and not history.arenas:
        others = ", ".join(leftovers.names()) or "none"
        raise ArenaNotFound(f"there is no arena {name!r} (any more); there are: {others}")


def _draw(history: History, arguments: argparse.Namespace, sort: str, sorts: tuple[str, ...]) -> int:
    try:
        from .panel import View, draw
    except ModuleNotFoundError as error:
        cure = "pip install 'shmsync[top]', or let it write lines: shmsync top | cat"
        print(f"on a terminal top needs {error.name}: {cure}", file=sys.stderr)
        return 2
    view = View(sort, ascii_only=not Page().shows("▁█"))
    looks = 1
    with Screen() as screen:
        due = time.monotonic() + arguments.interval
        while True:
            screen.show(draw(history, arguments.name, view, *screen.size, arguments.interval))
            key = screen.key(due)
            if key is None:
                if looks == arguments.count:
                    return 0
                history.look()
                looks, due = looks + 1, time.monotonic() + arguments.interval
                if arguments.name is not None and not history.arenas:
                    break
            elif "q" in key:
                return 0
            elif "s" in key:
                view.sort = sorts[(sorts.index(view.sort) + 1) % len(sorts)]
            elif "r" in key:
                view.backwards = not view.backwards
    print(f"arena {arguments.name} has ended")
    return 0


def _write(history: History, arguments: argparse.Namespace) -> int:
    page, looks = Page(), 1
    while True:
        _lines(page, history, arguments.interval)
        if looks == arguments.count:
            return 0
        time.sleep(arguments.interval)
        history.look()
        looks += 1
        if arguments.name is not None and not history.arenas:
            page.line(f"arena {arguments.name} has ended")
            return 0


def _lines(page: Page, history: History, interval: float) -> None:
    moment = time.strftime("%H:%M:%S")
    if not history.arenas:
        page.line(f"{moment} no arenas")
    for seen in history.arenas:
        parts = [moment, seen.name, seen.owner.value]
        if seen.readable:
            rate = per_second(history.rate_of(seen), interval)
            parts += [f"version {seen.version}", f"{rate}/s", f"readers {len(seen.readers)}", f"lag {most_lag(seen)}"]
            if seen.state != "open":
                parts.append(seen.state)
            if front := holders(seen):
                first = front[0]
                parts.append(f"held up by {name_of(first)} (pid {first.pid}) for {duration(first.pin_age)}")
            elif (late := slowest(seen)) is not None:
                parts.append(f"last {name_of(late)}")
        page.line(" ".join(parts))
    sys.stdout.flush()
