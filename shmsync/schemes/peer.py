"""Is the worker at the other end of a pipe alive? A pidfd, which poll() watches beside the pipe."""

from __future__ import annotations

import os
import select
import signal
import weakref
from typing import Any

from .. import _native
from ..memory.process import pid_of, start_ticks


class Peer:
    """One worker process, known by its Process object or by the owner word that it signed an answer with."""

    def __init__(self, *, process: Any = None, owner: int = 0) -> None:
        self._process = process
        self.pid = process.pid if process is not None else pid_of(owner)
        self._dead = False
        self.fd: int | None = None
        if self.pid is None:
            raise ValueError("this worker process is not started; call its start() first")
        if process is not None and process.exitcode is not None:
            self._dead = True
            return
        try:
            self.fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._dead = True
        except OSError:  # no pidfd here; the end of the pipe tells, unless others hold it too
            return
        else:
            weakref.finalize(self, os.close, self.fd)
            # A child of ours keeps its pid until we wait for it; another's may have been reused before we opened it.
            self._dead = bool(owner) and not _is(owner)

    @property
    def dead(self) -> bool:
        """Has it ended?"""
        if not self._dead and self.fd is not None:
            poller = select.poll()
            poller.register(self.fd, select.POLLIN)
            self._dead = bool(poller.poll(0))
        return self._dead

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end."""
        if not self.dead and self.fd is not None:
            poller = select.poll()
            poller.register(self.fd, select.POLLIN)
            self._dead = bool(poller.poll(int(seconds * 1000)))
        return self._dead

    @property
    def finished(self) -> bool:
        """Did it end by itself, with exit code 0?"""
        if self._process is None or not self.dead:
            return False
        try:
            self._process.join(1)  # a fork server tells the code a moment after the death
        except ValueError:  # its close() was called
            return False
        return self._exit_code == 0

    @property
    def _exit_code(self) -> int | None:
        try:
            return getattr(self._process, "exitcode", None)
        except ValueError:
            return None

    def __str__(self) -> str:
        code = self._exit_code
        if code is None:
            return f"pid {self.pid}"
        if code < 0:
            try:
                return f"pid {self.pid}, killed by {signal.Signals(-code).name}"
            except ValueError:
                pass
        return f"pid {self.pid}, exit code {code}"


def _is(owner: int) -> bool:
    """Is the process that has this pid now the one that signed with this word?"""
    try:
        return int(_native.pack_owner(pid_of(owner), start_ticks(pid_of(owner)))) == owner
    except OSError:
        return False
