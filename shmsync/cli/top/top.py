"""`shmsync top [NAME]`: a live table; one line each interval where there is no terminal to draw on.

The terminal is given back on every way out (a key, an error, Ctrl-C, SIGTERM, SIGHUP), and while Ctrl-Z stops the
program.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from ..measures import described, holders, not_found, slowest
from ..output import Commands, Page, command, duration, per_second, seconds
from .figures import ARENA_SORTS, READER_SORTS, History, most_lag

_EXAMPLES = """
shmsync top                                  all arenas
shmsync top policy                           one, with its readers; those that block the publisher are in front
shmsync top policy --sort lag --interval 0.2
shmsync top policy | tee lag.log             one line a second
"""
_KEYS = "keys: q quit, s sort by the next column, r reverse"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    names = None if arguments.name is None else [arguments.name]
    with closing(History(names)) as history, Events(drawn=drawn) as events:
        history.look()
        if arguments.name is not None and not history.arenas:
            raise not_found(arguments.name)
        status = (_draw if drawn else _write)(arguments, history, events, sorts, sort)
    if status == 0 and arguments.name is not None and not history.arenas:
        print(f"arena {arguments.name} has ended")
    return status


class Events:
    """Signals and keys, one after the other: none interrupts a look or a frame half way.

    Args:
        drawn: `top` has the terminal. Then keys, Ctrl-Z and a change of its size are events too.
    """

    def __init__(self, *, drawn: bool) -> None:
        self.keys = sys.stdin.fileno() if drawn and sys.stdin.isatty() else None
        self._numbers = (*_ENDING, signal.SIGWINCH, signal.SIGTSTP) if drawn else _ENDING
        self._before: dict[int, Any] = {}
        self._pipe = (-1, -1)

    def __enter__(self) -> Events:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)  # the kernel's numbers, as bytes
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for end in self._pipe:
            os.close(end)

    def next(self, until: float) -> signal.Signals | str | None:
        """A signal, or the keys that were pressed; None when this moment has come (time.monotonic())."""
        inputs = [self._pipe[0]] if self.keys is None else [self._pipe[0], self.keys]
        ready, _, _ = select.select(inputs, [], [], max(0.0, until - time.monotonic()))
        if self._pipe[0] in ready:
            return signal.Signals(os.read(self._pipe[0], 1)[0])
        if not ready:
            return None
        pressed = b""
        with suppress(OSError):  # the terminal is gone
            pressed = os.read(ready[0], 32)
        return signal.SIGHUP if not pressed else "" if pressed[:1] == b"\x1b" else pressed.decode("ascii", "replace")

    def stop_here(self) -> None:
        """Stop the program as Ctrl-Z does; returns when it goes on."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)


def _watch(
    arguments: argparse.Namespace, history: History, events: Events, show: Callable[[], None]
) -> Iterator[signal.Signals | str]:
    """Show each look; the events between two looks, after which the same look is shown again. Ends with the arena."""
    while True:
        show()
        if history.looks == arguments.count:
            return
        due = time.monotonic() + arguments.interval
        while (event := events.next(due)) is not None:
            yield event
            show()
        history.look()
        if arguments.name is not None and not history.arenas:
            return


def _draw(arguments: argparse.Namespace, history: History, events: Events, sorts: Sequence[str], sort: str) -> int:
    try:
        from .panel import Panel
    except ModuleNotFoundError:
        cure = "pip install 'shmsync[top]', or let it write lines: shmsync top | cat"
        print(f"on a terminal top needs rich: {cure}", file=sys.stderr)
        return 2
    panel = Panel(history, arguments.name, arguments.interval, sort)
    while True:
        with panel.live, _single_keys(events.keys):
            for event in _watch(arguments, history, events, panel.show):
                if event in _ENDING:
                    return 128 + int(event)
                if event is signal.SIGTSTP:
                    break
                if isinstance(event, str) and "q" in event:
                    return 0
                if isinstance(event, str) and "s" in event:
                    panel.sort = sorts[(sorts.index(panel.sort) + 1) % len(sorts)]
                if isinstance(event, str) and "r" in event:
                    panel.backwards = not panel.backwards
            else:
                return 0
        events.stop_here()


@contextmanager
def _single_keys(keys: int | None) -> Iterator[None]:
    """While it is entered, keys are read as they are pressed, and not shown."""
    if keys is None:
        yield
        return
    modes = termios.tcgetattr(keys)
    tty.setcbreak(keys, termios.TCSANOW)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(keys, termios.TCSADRAIN, modes)


def _write(arguments: argparse.Namespace, history: History, events: Events, *_: object) -> int:
    page = Page()
    for event in _watch(arguments, history, events, lambda: _lines(page, history, arguments.interval)):
        return 128 + int(event)
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
                parts.append(f"blocked by {described(front[0])} for {duration(front[0].pin_age)}")
            elif (late := slowest(seen)) is not None:
                parts.append(f"last {described(late)}")
        page.line(" ".join(parts))
    sys.stdout.flush()
