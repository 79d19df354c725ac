"""The terminal while `top` has it: an empty second screen and single keys; afterwards it is as it was.

It is given back on every way out: a key, an error, Ctrl-C, SIGTERM, SIGHUP; and while Ctrl-Z stops the program.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the second screen, without a cursor


class EndedBySignal(Exception):
    """A signal wants the program to end; `status` is what a shell would report."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


class Signals:
    """While it is entered, signals that end a program raise EndedBySignal, so that everything is put back first."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in _ENDING:
            self._before[number] = signal.signal(number, _end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    raise EndedBySignal(number)


class Screen:
    """The terminal of stdout, and the keys of stdin if that is one too."""

    def __init__(self) -> None:
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._wake: tuple[int, int] = (-1, -1)  # a pipe, written when the size changes or the program goes on
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Screen:
        self._wake = os.pipe()
        for end in self._wake:
            os.set_blocking(end, False)
        self._modes = termios.tcgetattr(self._keys) if self._keys is not None else None
        try:
            for number, handler in ((signal.SIGWINCH, self._redraw), (signal.SIGTSTP, self._stop)):
                self._before[number] = signal.signal(number, handler)
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not end this half way.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            self._give_back()
            for end in self._wake:
                os.close(end)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(sys.stdout.fileno())
            if found.columns and found.lines:
                return found.columns, found.lines
        return 80, 24

    def show(self, lines: list[str]) -> None:
        """Put these lines in place of what is there; no more than there is room for."""
        encoding = sys.stdout.encoding or "utf-8"
        text = "\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines[: self.size[1]]) + "\x1b[J"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()

    def key(self, until: float) -> str | None:
        """The next key; "" when the screen must be drawn again, None when this moment has come (time.monotonic())."""
        inputs = [self._wake[0]] if self._keys is None else [self._wake[0], self._keys]
        ready, _, _ = select.select(inputs, [], [], max(0.0, until - time.monotonic()))
        if self._wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], 1024)
            return ""
        if self._keys is not None and self._keys in ready:
            pressed = os.read(self._keys, 32)
            if not pressed:  # the terminal is gone
                raise EndedBySignal(signal.SIGHUP)
            return pressed.decode("ascii", "replace") if pressed[:1] != b"\x1b" else ""
        return None

    def _take(self) -> None:
        if self._keys is not None:
            tty.setcbreak(self._keys, termios.TCSANOW)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()

    def _give_back(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            os.write(sys.stdout.fileno(), _LEAVE.encode())
        if self._keys is not None and self._modes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)

    def _redraw(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes in any case
            os.write(self._wake[1], b"!")

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back, stop as one does, and take it again when the program goes on."""
        self._give_back()
        mine = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, mine)
        self._take()
        self._redraw()
