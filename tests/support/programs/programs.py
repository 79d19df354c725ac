"""Programs that a test starts and talks to line by line."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import psutil

from support.processes import until


def members(session):
    """Every process of a session that has not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def with_weights(processes, trainer):
    """Those of these processes that have the slab of an arena mapped, but for the trainer."""
    found = []
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            if process.pid != trainer and "memfd:shmsync:" in maps:
                found.append(process)
    return found


class Example:
    """An example that runs as a user would run it, in a separate directory.

    Its processes are known by a variable that all of them inherit: those of Ray and of torchrun
    have sessions of their own.
    """

    def __init__(self, directory, *command):
        self.mark = secrets.token_hex(8)
        self.pids, self.output, self.errors = set(), "", directory / f"stderr {self.mark}"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "default::ResourceWarning", *command],
                cwd=directory, env={**os.environ, "SHMSYNC_TEST": self.mark},
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def members(self):
        """Its processes now. Each look adds to those whose arenas are looked for at the end."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SHMSYNC_TEST") == self.mark:
                    found.append(process)
            except psutil.Error:  # gone, or a zombie
                pass
        self.pids |= {process.pid for process in found}
        return found

    def workers(self):
        return with_weights(self.members(), self.process.pid)

    def read_until(self, pattern):
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return line
        raise AssertionError(f"it ended before it printed {pattern!r}: {self.output}{self.errors.read_text()}")

    def end(self, code=0, unwanted="Traceback|ResourceWarning|shmsync/.*Warning"):
        """Its output, once it has ended, well and with nothing left."""
        for line in self.process.stdout:
            self.output += line
        errors = self.errors.read_text()
        assert self.process.wait() == code, self.output + errors
        assert not re.search(unwanted, errors), errors
        until(lambda: self.members() == [])  # resource trackers go a moment later
        pids = {self.process.pid, *self.pids}
        owned = [re.match(r"shmsync\.(\d+)-", name) for name in os.listdir("/dev/shm")]
        assert [found[0] for found in owned if found and int(found[1]) in pids] == []
        return self.output

    def kill(self):
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.process.stdout.close()
