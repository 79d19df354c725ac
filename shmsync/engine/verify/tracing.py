"""Traces: what the processes of an arena do, in one file that Perfetto shows (https://ui.perfetto.dev).

The publisher opens the file and says in its control segment which of its descriptors that is. Readers see that at
their next section, open the same file through /proc, and append to it too: native/include/shmsync/trace.hpp.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from types import TracebackType

from ... import _native
from ...errors import ProtocolError
from ...memory.system.calls import take_lock
from ...memory.system.process import pid_of

VARIABLE = "SHMSYNC_TRACE"  # of the environment: the file in which every publisher traces
_log = logging.getLogger("shmsync")
_HEAD = '[\n{"name":"shmsync trace",'  # by which a trace is known; no end is ever written, and viewers want none
_MODE = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_COUNTS = 1 << (32 - _native.TRACE_FD_BITS)
_numbers = itertools.count(1)


class TraceSwitch:
    """Begins and ends the traces of one arena, of which there is one at a time."""

    def __init__(self, writer: _native.Writer, control: _native.Control, name: str) -> None:
        self._writer, self._control, self.name = writer, control, name
        self._lock = threading.RLock()  # a finalizer may end a trace while its own thread begins one
        self._tracing: Tracing | None = None
        self._generation = _native.fork_generation()
        self._closed = False

    def begin(self, file: str | os.PathLike[str], deadline: float, check: Callable[[], None]) -> Tracing:
        """As Publisher.trace(). `check` raises once the arena is closed.

        It takes another lock than the writer's, so a publish() of another thread does not find that one taken.
        """
        check()
        self._refuse_second()
        tracing = Tracing(self, file, deadline)
        with self._lock:
            check()
            self._refuse_second()
            try:
                self._tracing = tracing
                tracing.begin()
            except BaseException:  # an interrupt may land anywhere
                self.stop()
                raise
        return tracing

    def begin_requested(self, deadline: float, check: Callable[[], None]) -> None:
        """Begin the trace that the environment asks for, if it does. Raises OSError if it cannot be made."""
        file = os.environ.get(VARIABLE)
        if file:
            try:
                self.begin(file, deadline, check)
            except OSError as error:
                why = f"{error.strerror} (the environment's {VARIABLE})"
                raise OSError(error.errno, why, error.filename) from None

    def write_to(self, trace: _native.Trace | None, which: int) -> None:
        """Write what is published into this from now on, and have the readers do so; None: nowhere."""
        self._writer.trace = trace
        self._control.ask_for_trace(which)

    def stop(self) -> None:
        """Write nothing any more. A no-op once the arena is closed, and in a forked child."""
        if self._closed or self._generation != _native.fork_generation():
            return
        with self._lock:
            self.write_to(None, 0)
            tracing, self._tracing = self._tracing, None
            if tracing is not None:
                tracing.ended()

    def end(self) -> None:
        """The arena ends, and its trace with it."""
        self.stop()
        self._closed = True

    def _refuse_second(self) -> None:
        if self._tracing is not None:
            raise ProtocolError(
                f"arena {self.name!r} is being traced into {self._tracing.file}; stop() that trace first, or unset "
                f"{VARIABLE}"
            )


class Tracing:
    """A trace that is being written: what Publisher.trace() returns. A context manager, whose end is stop().

    Attributes:
        file: its path.
    """

    def __init__(self, switch: TraceSwitch, file: str | os.PathLike[str], deadline: float) -> None:
        self.file = os.path.abspath(os.fspath(file))
        self._switch, self._name = switch, switch.name
        fd = _opened(self.file, deadline)
        try:
            self._trace: _native.Trace | None = _native.Trace(fd, _text(switch.name), of_writer=True)
        except OSError:
            raise OSError(errno.EMFILE, "no descriptor is left for a trace", self.file) from None
        finally:
            os.close(fd)

    def begin(self) -> None:
        """Write from now on."""
        assert self._trace is not None
        descriptor = self._trace.fd + 1
        if descriptor >> _native.TRACE_FD_BITS:
            raise OSError(errno.EMFILE, f"descriptor {self._trace.fd} is too large for a trace; close some", self.file)
        self._trace.name_process("trainer")
        which = next(_numbers) % _COUNTS << _native.TRACE_FD_BITS | descriptor
        self._switch.write_to(self._trace, which)

    def stop(self) -> None:
        """Write nothing any more, but for the publishes, sections and waits that are under way. Idempotent.

        A reader closes the file at its next section.
        """
        if self._trace is not None:
            self._switch.stop()
            self.ended()

    def ended(self) -> None:
        """For the writer of the arena, when it has stopped writing."""
        trace, self._trace = self._trace, None
        if trace is not None:
            warn_of_end(trace, self._name)

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<shmsync.Tracing of {self._name!r} in {self.file}{'' if self._trace else ', stopped'}>"


def warn_of_end(trace: _native.Trace, name: str) -> None:
    """This process has written its last into the trace of that arena: say so if it could not write all."""
    if trace.error:
        why = os.strerror(trace.error)
        _log.warning("arena %r: the trace lacks the last of what this process did: %s", name, why)


def joined(owner: int, which: int, name: str, worker: int | None) -> _native.Trace | None:
    """The trace of this publisher, for a reader; None, and a warning, where it cannot be had.

    Args:
        owner: the publisher.
        which: its descriptor, as layout.hpp packs it.
        name: the arena's.
        worker: the reader's index, if it has one.
    """
    path = f"/proc/{pid_of(owner)}/fd/{which % (1 << _native.TRACE_FD_BITS) - 1}"
    try:
        _refuse_odd(path)
        fd = os.open(path, _MODE)
        try:
            if not _is_trace(fd):
                raise OSError(errno.EINVAL, "it is no trace of shmsync", path)
            trace = _native.Trace(fd, _text(name))
        finally:
            os.close(fd)
    except Exception as error:  # sections go on without it
        _log.warning("arena %r: what this process does is missing in the trace: %s", name, error)
        return None
    if pid_of(owner) != os.getpid():
        trace.name_process("reader" if worker is None else f"worker {worker}")
    return trace


def _text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _refuse_odd(path: str) -> None:
    """Raise OSError, before it is opened, for what is no plain file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "a trace is a plain file, and this is none", path)


def _opened(path: str, deadline: float) -> int:
    """A descriptor that appends to this trace, which is begun in a file that is empty or not there.

    Raises FileExistsError for a file that has something else, BlockingIOError for one that another process has locked
    until the deadline, and what open() raises.
    """
    if os.path.exists(path):
        _refuse_odd(path)
    fd = os.open(path, _MODE | os.O_CREAT, 0o666)
    try:
        if not take_lock(fd, deadline):  # another process may be about to begin it
            raise BlockingIOError(errno.EAGAIN, "another process has locked this file", path)
        if os.fstat(fd).st_size == 0:
            micros = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
            where = f'"pid":{os.getpid()},"tid":{os.getpid()}'
            head = f'{_HEAD}"cat":"shmsync","ph":"i","s":"g","ts":{micros:.3f},{where}}}'.encode()
            head = head.ljust(_native.Trace.LINE)
            if os.write(fd, head) < len(head):
                os.ftruncate(fd, 0)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        elif not _is_trace(fd) or os.fstat(fd).st_size % _native.Trace.LINE:
            raise FileExistsError(
                errno.EEXIST,
                "this file is no trace of shmsync, or none that is whole, and stays as it is; give another name",
                path,
            )
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_trace(fd: int) -> bool:
    return os.pread(fd, len(_HEAD), 0) == _HEAD.encode()
