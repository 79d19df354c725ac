"""Traces: what the processes of an arena do, in one file that Perfetto shows (https://ui.perfetto.dev).

The publisher opens the file and says in its control segment which descriptor of its own that is. Readers see that at
their next section, open the same file through /proc, and append to it too: native/include/shmsync/trace.hpp.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from types import TracebackType
from typing import Protocol

from .. import _native
from ..errors import ProtocolError
from ..memory.process import pid_of

VARIABLE = "SHMSYNC_TRACE"  # of the environment: the file in which every publisher traces
_log = logging.getLogger("shmsync")
_HEAD = '[\n{"name":"shmsync trace",'  # by which a trace is known; no end is ever written, and viewers want none
_MODE = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
_PATIENCE = 1.0  # seconds in which another process that makes the file has written its first line


class Traced(Protocol):
    """Whose arena is traced."""

    name: str

    def write_trace(self, trace: _native.Trace | None, which: int) -> None:
        """Write what is published into this from now on, and have the readers do so; None: nowhere."""

    def end_trace(self) -> None:
        """Write nothing any more. Raises WriterBusy while another thread is writing."""


class Tracing:
    """A trace that is being written: what Publisher.trace() returns. A context manager, whose end is stop().

    Attributes:
        file: its path.
    """

    def __init__(self, traced: Traced, file: str | os.PathLike[str]) -> None:
        self.file = os.path.abspath(os.fspath(file))
        fd = _opened(self.file)
        self._traced, self._name = traced, traced.name
        self._trace: _native.Trace | None = _native.Trace(fd, _text(traced.name))
        self._trace.name_process("trainer")
        traced.write_trace(self._trace, fd + 1)

    def stop(self) -> None:
        """Write nothing any more; readers write until their section of now is over. Idempotent.

        Raises WriterBusy while another thread is in publish() or update().
        """
        if self._trace is not None:
            self._traced.end_trace()

    def ended(self) -> None:
        """For whose arena it is: it writes here no more."""
        trace, self._trace = self._trace, None
        if trace is not None and trace.error:
            _log.warning("arena %r: the trace in %s lacks its end: %s", self._name, self.file, os.strerror(trace.error))

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<shmsync.Tracing of {self._name!r} in {self.file}{'' if self._trace else ', stopped'}>"


def refuse_second(tracing: Tracing | None, name: str) -> None:
    """Raise ProtocolError if there is a trace already."""
    if tracing is not None:
        raise ProtocolError(f"arena {name!r} is being traced into {tracing.file}; stop() that trace first")


def joined(owner: int, which: int, name: str, worker: int) -> _native.Trace | None:
    """The trace of this publisher, for a reader; None, and a warning, where it cannot be had.

    Args:
        owner: the publisher.
        which: 1 + its descriptor.
        name: the arena's.
        worker: the reader's index; -1: none.
    """
    path = f"/proc/{pid_of(owner)}/fd/{which - 1}"
    try:
        fd = os.open(path, _MODE)
        try:
            if not _is_trace(fd):
                raise OSError(errno.EINVAL, "it is no trace of shmsync", path)
            trace = _native.Trace(os.dup(fd), _text(name))
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("arena %r: what this process does is missing in the trace: %s", name, error)
        return None
    if pid_of(owner) != os.getpid():
        trace.name_process("reader" if worker < 0 else f"worker {worker}")
    return trace


def _text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _opened(path: str) -> int:
    """A descriptor that appends to this trace, which is made if there is none.

    Raises FileExistsError for a file that is no trace, and what open() raises.
    """
    try:
        fd = os.open(path, _MODE | os.O_CREAT | os.O_EXCL, 0o666)
        micros = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
        head = f'{_HEAD}"cat":"shmsync","ph":"i","s":"g","ts":{micros:.3f},"pid":{os.getpid()},"tid":{os.getpid()}}}'
        os.write(fd, head.encode())
        return fd
    except FileExistsError:
        fd = os.open(path, _MODE)
    until = time.monotonic() + _PATIENCE
    while not _is_trace(fd):
        if os.fstat(fd).st_size or time.monotonic() > until:
            os.close(fd)
            raise FileExistsError(
                errno.EEXIST, "this file is no trace of shmsync, and stays as it is; give another name", path
            )
        time.sleep(0.001)
    return fd


def _is_trace(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, len(_HEAD), 0) == _HEAD.encode()
