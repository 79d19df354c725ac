"""A program on a separate terminal: a pty of a given size, what it draws, and the keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from support.processes import PATIENCE

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def take_the_terminal():
    """In the new process, which leads a session: make its stdin the terminal of that session, so that Ctrl-C works.

    A test run in the background of a shell ignores SIGINT, and would hand that down.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`shmsync ARGUMENTS` at `columns` x `lines`."""

    def __init__(self, *arguments, columns=120, lines=40):
        self.ours, self._theirs = pty.openpty()  # kept open, so that its modes can be read when the program has ended
        self.columns, self.lines = columns, lines
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes_before = termios.tcgetattr(self._theirs)
        environment = os.environ | {"TERM": "xterm-256color", "NO_COLOR": ""}
        for name in ("COLUMNS", "LINES"):  # rich prefers them to the terminal's own size
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmsync", *arguments],
            stdin=self._theirs, stdout=self._theirs, stderr=self._theirs, cwd="/",
            env=environment,
            start_new_session=True, preexec_fn=take_the_terminal,
        )  # fmt: skip
        self.text = ""

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def read(self):
        """Take in what has come, and what comes soon; frames that come without a pause do not keep it."""
        end = time.monotonic() + 0.5
        while time.monotonic() < end and select.select([self.ours], [], [], 0.05)[0]:
            self.text += os.read(self.ours, 65536).decode()

    def until(self, condition):
        """Until the lines of the newest whole frame are so; those lines."""
        end = time.monotonic() + PATIENCE
        while True:
            self.read()
            frame = self.frame()
            if frame and condition("\n".join(frame)):
                return frame
            assert self.process.poll() is None, f"it ended: {self.text[-2000:]}"
            assert time.monotonic() < end, f"waited in vain; it shows {frame}"

    def frame(self):
        """The newest whole frame of the present size, without colours. rich fills each line, the last one too."""
        for part in reversed(self.text.split("\x1b[H")):
            lines = [ESCAPES.sub("", line) for line in part.partition("\x1b[?")[0].split("\r\n")]
            if len(lines) == self.lines and len(lines[-1]) >= self.columns:
                return [line.rstrip() for line in lines]
        return []

    def ended(self):
        """Wait for its end; the exit status."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end, f"it does not end; it shows {self.frame()}"
        self.read()
        return self.process.returncode

    def restored(self):
        """Are its modes, the screen and the cursor as they were?"""
        left = self.text.rpartition(LEAVE)[2]
        screens = self.text.count(ENTER) == self.text.count(LEAVE) and "\x1b[H" not in left
        cursor = self.text.rpartition("\x1b[?25l")[2].count("\x1b[?25h") > 0 or "\x1b[?25l" not in self.text
        return screens and cursor and termios.tcgetattr(self._theirs) == self.modes_before

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)
