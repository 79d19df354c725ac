"""Programs that a test starts and talks to line by line, and what a process becomes that runs another one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from support.processes import state, until


def become_sleep(_):
    """Run another program in this process. It keeps its pid and its start time, and loses all memory."""
    os.execv("/bin/sleep", ["sleep", "100000"])


def run_a_child(_):
    """Start another program, and wait for its end. It runs in this process's memory until it begins."""
    subprocess.run(["/bin/true"], check=True)


def until_it_sleeps(pid):
    """Until become_sleep() is done, and the kernel shows all of the new program."""
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n" and state(pid) == "S")


def members(session):
    """Every process of a session that has not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def workers(session):
    """Those that have the slab of an arena mapped, but for the leader of the session, which is the trainer."""
    found = []
    for process in members(session):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            if process.pid != session and "memfd:shmsync:" in maps:
                found.append(process)
    return found


class Program:
    """A Python program of its own: `say()` writes it a line, `hear()` reads one."""

    def __init__(self, source, *arguments, before=()):
        command = [*before, sys.executable, "-c", source, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def say(self, line="go"):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self):
        """Its next line; fails when it has ended."""
        line = self._process.stdout.readline().strip()
        assert line, f"the program ended with {self._process.wait()}"
        return line

    def kill(self):
        self._process.kill()
        self._process.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
