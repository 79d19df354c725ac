"""One end of a duplex multiprocessing.Pipe, read and written without ever blocking.

Connection.send() blocks while the other side does not read, and Connection.recv() while half a message is there; with a
peer that was stopped or killed that may never end. The frames here are those of Connection, and no byte beyond a
message is read: so either side may be a plain Connection, between two messages.
"""

from __future__ import annotations

import io
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
from typing import Any, ClassVar

from typing_extensions import Self

from ..engine.deadlines import SLICE
from ..memory.process import poll, refusals
from .messages import Tag, Unpickler

_log = logging.getLogger("shmsync")
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MOST = 1 << 18  # bytes in one read; the system holds about as many of a pipe


class _Borrowed(socket.socket):
    """The socket of a Connection, which closes it itself."""

    def __del__(self) -> None:
        self.detach()


class Pipe:
    """Whole messages in and out. Made once for a Connection, by of(); holds it weakly, and borrows its socket.

    A sender's end is a Link, a receiver's an Inbox (links.py). Several models, and so several threads, may share it.

    Attributes:
        unsent: what flush() has to write, oldest first: a frame, how many bytes of it are sent, and its tag if it has
            weights.
        pending: messages that are not about weights, oldest first.
        ended: how the other side has ended, as far as it was noticed; "" if it has not.
    """

    side: ClassVar[str] = ""  # whose end it is

    def __init__(self, connection: Connection) -> None:
        self.fd = connection.fileno()
        with refusals("looking at a worker's pipe"):
            if not stat.S_ISSOCK(fstat(self.fd).st_mode):
                raise ValueError("weights are sent and answered over one pipe: use multiprocessing.Pipe(duplex=True)")
            self._socket = _Borrowed(fileno=self.fd)
            if self._socket.gettimeout() is not None:  # socket.setdefaulttimeout() would change the user's pipe
                self._socket.settimeout(None)
        self._connection = weakref.ref(connection)
        self._incoming = bytearray()  # of the message that comes, its header first and then the message itself
        self._size, self._in_header = 4, True  # bytes that it will have
        self.unsent: deque[tuple[bytes, int, Tag | None]] = deque()
        self.pending: deque[Any] = deque()
        self.ended = ""
        self.lock = threading.RLock()

    @staticmethod
    def known(connection: Any) -> Pipe | None:
        """That of a connection, if there is one. Raises ValueError for what is no connection."""
        if not isinstance(connection, Connection):
            raise ValueError(
                f"a worker is reached over one end of multiprocessing.Pipe(), not over a {type(connection).__name__}"
            )
        return connection.__dict__.get("_shmsync_pipe")

    @classmethod
    def of(cls, connection: Any) -> Self:
        """That of a connection; the same one each time. Raises ValueError for what cannot be this side's end."""
        pipe = cls.known(connection)
        if pipe is None:
            pipe = connection.__dict__["_shmsync_pipe"] = cls(connection)
        if not isinstance(pipe, cls):
            raise ValueError(f"this end of the pipe is a {pipe.side}'s; a {cls.side} needs the other end")
        return pipe

    @property
    def closed(self) -> bool:
        """Is this end closed? Another file may have its number then."""
        connection = self._connection()
        return connection is None or connection.closed

    def send(self, frame: bytes) -> None:
        """Write a framed message as far as the pipe takes it; flush() writes the rest. Raises OSError when closed."""
        with self.lock:
            if self.closed:
                raise OSError("this end of the pipe is closed")
            self.unsent.append((frame, 0, None))
            self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now. For a caller that has the lock, and knows this end to be open.

        Nothing is left for an other side that is gone: the next read says so.
        """
        while self.unsent:
            frame, done, tag = self.unsent[0]
            try:
                done += self._socket.send(memoryview(frame)[done:], _AT_ONCE)
            except ConnectionError:
                self.unsent.clear()
            except OSError:  # the pipe is full, or the system has no memory for it now
                return
            else:
                if done < len(frame):
                    self.unsent[0] = frame, done, tag
                else:
                    self.unsent.popleft()

    def receive(self) -> tuple[Any] | None:
        """The next message, in a tuple of one, and no byte beyond it; None while no whole one is there.

        A message that cannot be unpickled here is kept in `pending`. For a caller that knows this end to be open.
        """
        while not self.ended:
            if missing := self._size - len(self._incoming):
                try:
                    data = self._socket.recv(min(missing, _MOST), _AT_ONCE)
                except ConnectionError:
                    data = b""
                except OSError:  # nothing is there, or the system has no memory for it now
                    return None
                if not data:
                    self.ended = "the other end of the pipe is closed"
                self._incoming += data
                continue
            came, self._incoming = self._incoming, bytearray()
            if self._in_header:
                (size,) = struct.unpack("!i" if len(came) == 4 else "!Q", came)
                if size == -1:  # a long message, whose size follows
                    size, self._in_header = 8, True
                elif not 0 <= size < 1 << 48:
                    self.ended = "what came from its other end is no message, so nothing after it can be read"
                else:
                    self._in_header = False
                self._size = size
                continue
            self._size, self._in_header = 4, True
            payload = bytes(came)  # which is unpickled where it lies, as a bytearray is not
            del came
            try:
                return (Unpickler(io.BytesIO(payload)).load(),)
            except Exception as error:
                _log.warning("a message of %d bytes cannot be unpickled, and is kept: %s", len(payload), error)
            self.pending.append(payload)
        return None

    def wait(self, deadline: float) -> None:
        """Until there is something to read, or for a slice, or until the deadline."""
        poller = select.poll()  # one for each thread
        poller.register(self.fd, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        poll(poller, milliseconds(deadline))

    def take_pending(self) -> list[Any]:
        """The messages that are not about weights, oldest first; each is given once."""
        found = list(self.pending)
        self.pending.clear()
        return found


def milliseconds(deadline: float) -> float:
    """From now to a monotonic time, for poll(); at most 25, so that the caller can look round."""
    return max(0.0, min(deadline - time.monotonic(), SLICE)) * 1e3
