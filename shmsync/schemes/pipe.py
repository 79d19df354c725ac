"""One end of a duplex multiprocessing.Pipe, read and written without ever blocking.

Connection.send() blocks while the other side does not read, and Connection.recv() while half a message is there; with a
peer that was stopped or killed that may never end. The frames here are those of Connection, and no byte beyond a
message is read: so either side may be a plain Connection, between two messages.
"""

from __future__ import annotations

import logging
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections import deque
from multiprocessing.connection import Connection
from os import fstat
from typing import Any

from ..engine.deadlines import SLICE
from ..memory.process import poll, refusals
from .messages import loads

_log = logging.getLogger("shmsync")
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_SIZE = struct.Struct("!i")
_LONG = 0x7FFFFFFF  # bytes; a longer message has a header of its own kind
_MOST = 1 << 18  # bytes in one read; the system holds about as many of a pipe


def framed(payload: bytes) -> bytes:
    """A message as Connection.send_bytes() writes it."""
    size = len(payload)
    return (_SIZE.pack(size) if size <= _LONG else struct.pack("!iQ", -1, size)) + payload


class _Borrowed(socket.socket):
    """The socket of a Connection, which closes it itself."""

    def __del__(self) -> None:
        self.detach()


_Outgoing = tuple[memoryview, bool, tuple[str, int] | None]  # what is left of a message, has it begun to leave?, tag


class Pipe:
    """Whole messages in and out. Made once for a Connection, by of(); holds it weakly, and borrows its socket.

    Attributes:
        pending: messages that are not about weights, oldest first.
        ended: how the other side has ended, as far as it was noticed; "" if it has not.
        end: what reads it: a Link or an Inbox.
        lock: several models, and so several threads, may share a pipe.
    """

    def __init__(self, connection: Connection) -> None:
        fd = connection.fileno()
        with refusals("looking at a worker's pipe"):
            if not stat.S_ISSOCK(fstat(fd).st_mode):
                raise ValueError("weights are sent and answered over one pipe: use multiprocessing.Pipe(duplex=True)")
            self._socket = _Borrowed(fileno=fd)
            if self._socket.gettimeout() is not None:  # socket.setdefaulttimeout() would change the user's pipe
                self._socket.settimeout(None)
        self.fd = fd
        self._connection = weakref.ref(connection)
        self._outgoing: deque[_Outgoing] = deque()
        self._incoming = bytearray()
        self._begin, self._end = 0, 4  # of the message that comes, in it
        self.pending: deque[Any] = deque()
        self.ended = ""
        self.end: Any = None
        self.lock = threading.RLock()

    @classmethod
    def of(cls, connection: Connection) -> Pipe:
        """The Pipe of a connection; the same one each time."""
        if not isinstance(connection, Connection):
            raise ValueError(
                f"a worker is reached over one end of multiprocessing.Pipe(), not over a {type(connection).__name__}"
            )
        pipe: Pipe | None = connection.__dict__.get("_shmsync_pipe")
        if pipe is None:
            pipe = connection.__dict__["_shmsync_pipe"] = cls(connection)
        return pipe

    @property
    def closed(self) -> bool:
        """Is this end closed?"""
        connection = self._connection()
        return connection is None or connection.closed

    @property
    def over(self) -> bool:
        """Is this end closed, or the other one, as far as it was noticed?"""
        return bool(self.ended) or self.closed

    def check_open(self) -> None:
        """Raise OSError if this end is closed: another file may have its number."""
        if self.closed:
            raise OSError("this end of the pipe is closed")

    # ---- out

    @property
    def unsent(self) -> bool:
        """Is there something that flush() has to write?"""
        return bool(self._outgoing)

    def send(self, payload: bytes) -> None:
        """Write a message as far as the pipe takes it; flush() writes the rest."""
        self.send_frame(framed(payload))

    def send_frame(self, frame: bytes, tag: tuple[str, int] | None = None) -> list[tuple[str, int]]:
        """As send(), of weights if there is a tag: (model, version).

        They take the place of those of the model that have not begun to leave, whose tags are returned.
        """
        with self.lock:
            replaced = []
            if tag is not None and self._outgoing:
                for each in list(self._outgoing):
                    _, has_begun, other = each
                    if other is not None and other[0] == tag[0] and not has_begun:
                        self._outgoing.remove(each)
                        replaced.append(other)
            self._outgoing.append((memoryview(frame), False, tag))
            self.flush()
            return replaced

    def flush(self) -> None:
        """Write what the pipe takes now. Nothing is left for an other side that is gone: the next read says so."""
        with self.lock:
            self.check_open()
            while self._outgoing:
                rest, _, tag = self._outgoing[0]
                try:
                    sent = self._socket.send(rest, _AT_ONCE)
                except ConnectionError:
                    self._outgoing.clear()
                except OSError:  # the pipe is full, or the system has no memory for it now
                    return
                else:
                    if sent < rest.nbytes:
                        self._outgoing[0] = rest[sent:], True, tag
                    else:
                        self._outgoing.popleft()

    # ---- in

    def receive(self) -> tuple[Any] | None:
        """The next message, in a tuple of one, and no byte beyond it; None while no whole one is there."""
        while len(self._incoming) < self._end:
            if self.ended or not self._read():
                return None
        return self._next_message()

    def _read(self) -> int:
        """Read what there is of the message that comes; how many bytes came. Notices the end."""
        buffer = self._incoming
        try:
            data = self._socket.recv(min(self._end - len(buffer), _MOST), _AT_ONCE)
        except ConnectionError:
            data = b""
        except OSError:  # nothing is there, or the system has no memory for it now
            return 0
        buffer += data
        if not data:
            self.ended = "the other end of the pipe is closed"
        elif not self._begin:
            self._find_bounds()
        return len(data)

    def _next_message(self) -> tuple[Any] | None:
        """The next of the messages that were read, in a tuple of one; None when no whole one was.

        A message that cannot be unpickled here is kept in `pending`.
        """
        while self._begin and len(self._incoming) >= self._end:
            payload = memoryview(self._incoming)[self._begin : self._end]
            self._incoming = self._incoming[self._end :]
            self._find_bounds()
            try:
                return (loads(payload),)
            except Exception as error:
                _log.warning("a message of %d bytes cannot be unpickled, and is kept: %s", len(payload), error)
            self.pending.append(bytes(payload))
        return None

    def _find_bounds(self) -> None:
        """Where the message that comes begins and ends; 0 and the end of its header while that is not whole."""
        buffer = self._incoming
        self._begin, self._end = 0, 4
        if len(buffer) < 4:
            return
        (size,) = _SIZE.unpack_from(buffer)
        if size == -1:
            self._end = 12
            if len(buffer) < 12:
                return
            (size,) = struct.unpack_from("!Q", buffer, 4)
        if 0 <= size < 1 << 48:
            self._begin, self._end = self._end, self._end + size
        else:
            self.ended = "what came from its other end is no message, so nothing after it can be read"

    def wait(self, deadline: float) -> None:
        """Until there is something to read, or for a slice, or until the deadline."""
        poller = select.poll()  # one for each thread
        poller.register(self.fd, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll(poller, milliseconds(deadline))
        if self._outgoing:
            self.flush()

    def take_pending(self) -> list[Any]:
        """The messages that are not about weights, oldest first; each is given once."""
        found = list(self.pending)
        self.pending.clear()
        return found


def milliseconds(deadline: float) -> float:
    """From now to a monotonic time, for poll(); at most 25, so that the caller can look round."""
    return max(0.0, min(deadline - time.monotonic(), SLICE)) * 1e3
