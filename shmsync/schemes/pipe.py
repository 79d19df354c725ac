"""One end of a duplex multiprocessing.Pipe, read and written without ever blocking.

Connection.send() blocks while the other side does not read, and Connection.recv() while half a message is there; with a
peer that was stopped or killed that may never end. The frames here are those of Connection, and no byte beyond a
message is read: so the other side may be a plain Connection, and so may this side between two messages.
"""

from __future__ import annotations

import errno
import logging
import pickle
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from os import fstat
from typing import Any

from ..engine.deadlines import SLICE
from ..memory.process import poll, refusals

_log = logging.getLogger("shmsync")
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
_SIZE = struct.Struct("!i")
_LONG = 0x7FFFFFFF  # bytes; a longer message has a header of its own kind


def framed(payload: bytes) -> bytes:
    """A message as Connection.send_bytes() writes it."""
    size = len(payload)
    return (_SIZE.pack(size) if size <= _LONG else struct.pack("!iQ", -1, size)) + payload


class _Borrowed(socket.socket):
    """The socket of a Connection, which closes it itself."""

    def __del__(self) -> None:
        self.detach()


class _Frame:
    """A message on its way out. `sent`: how many bytes each write took. `tag`: of weights that newer ones replace."""

    __slots__ = ("content", "sent", "tag")

    def __init__(self, content: bytes, tag: tuple[str, int] | None) -> None:
        self.content, self.tag = content, tag
        self.sent: list[int] = []


class Pipe:
    """Whole messages in and out. Made once for a Connection, by of(); holds it weakly, and borrows its socket.

    Bytes are counted by the same C call that moves them (extend over map). Python handles a signal between two calls,
    so a Ctrl-C loses neither a byte nor the place in the stream.

    Attributes:
        pending: messages that are not about weights, oldest first.
        ended: how the other side has ended, as far as it was noticed; "" if it has not.
        end: what reads it: a Link or an Inbox of schemes.
        loads: unpickles what comes.
    """

    def __init__(self, connection: Connection) -> None:
        fd = connection.fileno()
        with refusals("looking at a worker's pipe"):
            if not stat.S_ISSOCK(fstat(fd).st_mode):
                raise ValueError("weights are sent and answered over one pipe: use multiprocessing.Pipe(duplex=True)")
            borrowed = _Borrowed(fileno=fd)
            if borrowed.gettimeout() is not None:  # socket.setdefaulttimeout() would change the user's pipe
                borrowed.settimeout(None)
            self._send, self._recv_into = borrowed.send, borrowed.recv_into
        self.fd = fd
        self._connection = weakref.ref(connection)
        self._outgoing: deque[_Frame] = deque()
        self._incoming: tuple[bytearray, list[int], bool] = bytearray(4), [], False  # what comes, counts, is it a body?
        self.pending: deque[Any] = deque()
        self.ended = ""
        self.end: Any = None
        self.loads: Callable[[Any], Any] = pickle.loads
        self.lock = threading.RLock()  # several models, and so several threads, may share a pipe

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
        """Raise OSError if this end is closed."""
        if self.closed:
            raise OSError("this end of the pipe is closed")

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
            self.check_open()
            replaced = []
            for each in list(self._outgoing):
                if tag is not None and each.tag is not None and each.tag[0] == tag[0] and not each.sent:
                    self._outgoing.remove(each)
                    replaced.append(each.tag)
            self._outgoing.append(_Frame(frame, tag))
            self._write()
            return replaced

    def flush(self) -> None:
        """Write what the pipe takes now. Nothing is left for an other side that is gone: the next read says so."""
        if self._outgoing:
            with self.lock:
                self.check_open()
                self._write()

    def _write(self) -> None:
        while self._outgoing:
            frame = self._outgoing[0]
            done = sum(frame.sent)
            rest = memoryview(frame.content)[done:] if done else frame.content
            try:
                frame.sent.extend(map(self._send, (rest,), (_AT_ONCE,)))
            except OSError as error:
                if error.errno not in _GONE:  # the pipe is full, or the system has no memory for it now
                    return
                self._outgoing.clear()
            else:
                if sum(frame.sent) == len(frame.content):
                    self._outgoing.popleft()

    def receive(self) -> tuple[Any] | None:
        """The next message, in a tuple of one; None while no whole one is there. Raises EOFError at the end.

        A message that cannot be unpickled here is kept in `pending`.
        """
        with self.lock:
            self.check_open()
            while not self.ended:
                buffer, counts, is_body = self._incoming
                done = sum(counts)
                if done < len(buffer):
                    rest = memoryview(buffer)[done:] if done else buffer
                    try:
                        counts.extend(map(self._recv_into, (rest,), (0,), (_AT_ONCE,)))
                    except OSError as error:
                        if error.errno not in _GONE:
                            return None
                        counts.append(0)
                    if counts[-1] == 0:
                        self.ended = "the other end of the pipe is closed"
                    if sum(counts) < len(buffer):
                        continue
                if is_body:
                    self._incoming = bytearray(4), [], False
                    try:
                        return (self.loads(buffer),)
                    except Exception as error:
                        _log.warning("a message of %d bytes cannot be unpickled, and is kept: %s", len(buffer), error)
                    self.pending.append(bytes(buffer))
                    continue
                (size,) = _SIZE.unpack_from(buffer)
                if size == -1 and len(buffer) == 4:
                    self._incoming = buffer + bytes(8), counts, False
                    continue
                if size == -1:
                    (size,) = struct.unpack_from("!Q", buffer, 4)
                if 0 <= size < 1 << 48:
                    self._incoming = bytearray(size), [], True
                else:
                    self.ended = "what came from its other end is no message, so nothing after it can be read"
            raise EOFError(self.ended)

    def wait(self, deadline: float) -> None:
        """Until there is something to read, or for a slice, or until the deadline."""
        self.check_open()
        poller = select.poll()
        poller.register(self.fd, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll(poller, milliseconds(deadline))
        self.flush()

    def take_pending(self) -> list[Any]:
        """The messages that are not about weights, oldest first; each is given once."""
        found = list(self.pending)
        self.pending.clear()
        return found


def milliseconds(deadline: float) -> float:
    """From now to a monotonic time, for poll(); at most 50, so that the caller can look round."""
    return max(0.0, min(deadline - time.monotonic(), SLICE)) * 1e3
