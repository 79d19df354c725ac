"""A program on a separate terminal: a pty of a given size, what it draws, and the keys that are pressed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
import traceback

from shmsync import cli
from support.processes import PATIENCE

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def run_command(conn, paths, arguments, environment):
    """In a new process: `shmsync ARGUMENTS` over these files, as the foreground job of their terminal."""
    os.setsid()  # the first terminal that it opens becomes its own
    for number, path in enumerate(paths):
        os.dup2(os.open(path, os.O_RDWR), number)
    pid = os.fork()
    if pid == 0:
        become_the_foreground_job()
        os.environ.update(environment)
        for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            setattr(sys, name, open(number, mode, encoding="utf-8", buffering=1, closefd=False))  # noqa: SIM115
        try:
            status = cli.main(arguments)
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
            status = 99
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    conn.send(pid)
    _, status = os.waitpid(pid, 0)
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def become_the_foreground_job():
    """As a shell makes one. Else Ctrl-Z would not stop it, and Ctrl-C not reach it."""
    os.setpgid(0, 0)
    if os.isatty(1):
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(1, os.getpid())
        signal.signal(signal.SIGTTOU, before)


def run(server, folder, *arguments, **environment):
    """The command without a terminal: (status, stdout, stderr)."""
    out, err = folder / "out", folder / "err"
    for path in (out, err):
        path.write_text("")
    conn, theirs = server.Pipe()
    process = server.Process(
        target=run_command, args=(theirs, ["/dev/null", str(out), str(err)], arguments, environment)
    )
    process.start()
    process.join(PATIENCE)
    conn.close()
    return process.exitcode, out.read_text(), err.read_text()


class Terminal:
    """`shmsync ARGUMENTS` at `columns` x `lines`; `server` starts processes."""

    def __init__(self, server, *arguments, columns=120, lines=40, **environment):
        self.ours, self._theirs = pty.openpty()  # kept open, so that its modes can be read when the program has ended
        self.columns, self.lines = columns, lines
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes_before = termios.tcgetattr(self._theirs)
        path = os.ttyname(self._theirs)
        environment = {"TERM": "xterm-256color", "NO_COLOR": ""} | environment
        conn, theirs = server.Pipe()
        self.process = server.Process(
            target=run_command, args=(theirs, [path] * 3, arguments, environment), daemon=True
        )
        self.process.start()
        theirs.close()
        self.pid = conn.recv()
        conn.close()
        self.text = ""

    def signal(self, number):
        os.kill(self.pid, number)

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def read(self, seconds=0.05):
        """Take in what has come."""
        while select.select([self.ours], [], [], seconds)[0]:
            self.text += os.read(self.ours, 65536).decode()

    def until(self, condition):
        """Until the lines of the newest whole frame are so; those lines."""
        end = time.monotonic() + PATIENCE
        while True:
            self.read()
            frame = self.frame()
            if frame and condition("\n".join(frame)):
                return frame
            assert self.process.is_alive(), f"it ended: {self.text[-2000:]}"
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
        while self.process.is_alive():
            self.read()
            assert time.monotonic() < end, f"it does not end; it shows {self.frame()}"
        self.read()
        return self.process.exitcode

    def restored(self):
        """Are its modes, the screen and the cursor as they were?"""
        left = self.text.rpartition(LEAVE)[2]
        screens = self.text.count(ENTER) == self.text.count(LEAVE) and "\x1b[H" not in left
        cursor = self.text.rpartition("\x1b[?25l")[2].count("\x1b[?25h") > 0 or "\x1b[?25l" not in self.text
        return screens and cursor and termios.tcgetattr(self._theirs) == self.modes_before

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join()
        os.close(self.ours)
        os.close(self._theirs)
