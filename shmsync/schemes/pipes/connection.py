"""One end of a duplex multiprocessing.Pipe, read and written without ever blocking.

Connection.send() blocks while the other side does not read, and Connection.recv() while half a message is there; with a
peer that was stopped or killed that is for ever. The frames here are those of Connection, so the other side may be a
plain one, and so may this side between two messages.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import stat
import struct
import threading
import weakref
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from ... import _native
from ...engine.timing import slice_until
from .messages import Tag

_log = logging.getLogger("shmsync")
_LONG = 0x7FFFFFFF  # sizes above it have a longer header
_CHUNK = 1 << 20


class _Frame:
    """A message on its way out."""

    def __init__(self, payload: bytes, tag: Tag | None) -> None:
        size = len(payload)
        header = struct.pack("!i", size) if size <= _LONG else struct.pack("!iQ", -1, size)
        small = size <= 1 << 14
        self.views = [memoryview(header + payload)] if small else [memoryview(header), memoryview(payload)]
        self.tag = tag
        self.begun = False


class Channel:
    """Whole messages in and out. Made once for a connection, by of(); holds it weakly."""

    def __init__(self, connection: Connection) -> None:
        fd = connection.fileno()
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ValueError("weights are sent and answered over one pipe: use multiprocessing.Pipe(duplex=True)")
        self._connection = weakref.ref(connection)
        # Borrows the descriptor, which stays the connection's.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
        weakref.finalize(self, self._socket.detach)
        self._socket.settimeout(None)  # whatever socket.setdefaulttimeout() says
        self.fd = fd
        self.ended = False  # the other end is closed
        self.pending: deque[Any] = deque()  # messages that are not about weights
        self.role: Any = None  # the Inbox or the Answers that reads it
        self.lock = threading.RLock()  # several models, and so several threads, may share a pipe
        self._out: deque[_Frame] = deque()
        self._midway = False  # in a step that moves bytes
        self._header = b""
        self._body: bytearray | None = None  # of the message that is half read
        self._have = 0

    @classmethod
    def of(cls, connection: Connection) -> Channel:
        """The channel of a connection; the same one each time, so that several models can share a pipe."""
        if not isinstance(connection, Connection):
            raise ValueError(
                f"a worker is reached over one end of multiprocessing.Pipe(), not over a {type(connection).__name__}"
            )
        channel: Channel | None = connection.__dict__.get("_shmsync_channel")
        if channel is None:
            channel = connection.__dict__["_shmsync_channel"] = cls(connection)
        return channel

    @property
    def closed(self) -> bool:
        """Is this end closed?"""
        connection = self._connection()
        return connection is None or connection.closed

    def queue(self, payload: bytes, tag: Tag | None = None) -> list[Tag]:
        """Send it, as far as it goes; flush() sends the rest. With a tag it takes the place of an older message about
        the same model that has not begun to leave: to a worker that does not read, only the newest weights are kept.
        Returns the tags of the messages that it replaced."""
        with self.lock:
            old = [f for f in self._out if tag and f.tag and f.tag.model_id == tag.model_id and not f.begun]
            for frame in old:
                self._out.remove(frame)
            self._out.append(_Frame(payload, tag))
            self.flush()
            return [frame.tag for frame in old if frame.tag]

    def send_small(self, payload: bytes) -> None:
        """The same for a small message; quick when nothing else is on its way."""
        with self.lock:
            if self._out or self.closed:
                self.queue(payload)
            elif left := _native.send_frame([self.fd], payload):
                self.resume(payload, left[0][1])

    def resume(self, payload: bytes, sent: int, tag: Tag | None = None) -> None:
        """Go on with a message of which `sent` bytes, header included, have left; -1: the other end is closed."""
        if sent < 0:
            self.ended = True
            return
        frame = _Frame(payload, tag)
        frame.views[0] = frame.views[0][sent:]
        frame.begun = sent > 0
        self._out.append(frame)

    @property
    def idle(self) -> bool:
        """Is no message half written or half read?"""
        return not self._out and not self._header and self._body is None

    @property
    def readable(self) -> bool:
        """Is there something to read at this moment?"""
        return not self.closed and _native.wait_readable(self.fd, 0)

    def take_small(self) -> bytes | None:
        """The next message, not unpickled, if it is small and all there; read() gives any other."""
        with self.lock:
            return _native.take_frame(self.fd) if self.idle and not self.closed else None

    def take_pending(self) -> list[Any]:
        """The messages that are not about weights, oldest first; each is given once."""
        found = list(self.pending)
        self.pending.clear()
        return found

    @property
    def unsent(self) -> bool:
        """Is there something that flush() has to send?"""
        return bool(self._out)

    def flush(self) -> None:
        """Write what the pipe takes now."""
        with self.lock:
            while self._out:
                frame = self._out[0]
                if self._interrupted():
                    return
                try:
                    sent = self._open().send(frame.views[0][:_CHUNK], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._midway = False
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._midway = False
                    self.ended = True  # what it sent before can still be read
                    self._out.clear()
                    return
                frame.begun = True
                frame.views[0] = frame.views[0][sent:]
                self._midway = False
                if not frame.views[0]:
                    del frame.views[0]
                if not frame.views:
                    self._out.popleft()

    def _interrupted(self) -> bool:
        """Asked before bytes move. A signal handler may raise after the system call and before its result is stored;
        then nobody knows where the stream is, and the pipe counts as ended."""
        if self._midway:
            self.ended = True
            self._out.clear()
            return True
        self._midway = True
        return False

    def read(self) -> tuple[Any] | None:
        """The next message, in a tuple of one; None if no whole one is there. Raises EOFError."""
        while True:
            with self.lock:
                payload = self._frame()
            if payload is None:
                return None
            message = self.loads(payload)
            if message is not None:
                return message

    def loads(self, payload: bytes | bytearray) -> tuple[Any] | None:
        """A message, in a tuple of one. None for what is no pickle, or has a class that is not here: it is kept."""
        try:
            return (pickle.loads(payload),)
        except Exception as error:
            _log.warning("a message of %d bytes cannot be unpickled here, and is kept: %s", len(payload), error)
            self.pending.append(bytes(payload))
            return None

    def wait(self, deadline: float) -> None:
        """Until there is something to read, or the other end is closed, or the monotonic time is `deadline`."""
        poller = select.poll()
        poller.register(self._open().fileno(), select.POLLIN | (select.POLLOUT if self._out else 0))
        poller.poll(milliseconds(deadline))
        self.flush()

    def _open(self) -> socket.socket:
        if self.closed:
            self._midway = False
            raise OSError("this end of the pipe is closed")
        return self._socket

    def _frame(self) -> bytes | bytearray | None:
        if self._interrupted():
            raise EOFError("the pipe was interrupted in the middle of a message; make a new one")
        try:
            if self._body is None:
                self._read_header()
            body = self._body
            assert body is not None
            while self._have < len(body):
                got = self._open().recv_into(memoryview(body)[self._have :], 0, socket.MSG_DONTWAIT)
                if got == 0:
                    raise EOFError
                self._have += got
        except BlockingIOError:
            self._midway = False
            return None
        except (EOFError, ConnectionResetError):
            self._midway = False
            self.ended = True
            raise EOFError("the other end of the pipe is closed") from None
        self._header, self._body, self._have = b"", None, 0
        self._midway = False
        return body

    def _read_header(self) -> None:
        while True:
            long = self._header[:4] == b"\xff\xff\xff\xff"
            missing = (12 if long else 4) - len(self._header)
            if missing == 0:
                break
            part = self._open().recv(missing, socket.MSG_DONTWAIT)
            if not part:
                raise EOFError
            self._header += part
        size = struct.unpack("!iQ" if long else "!i", self._header)[-1]
        self._body = bytearray(size)


def milliseconds(deadline: float) -> float:
    """From now to a monotonic time, for poll(); at most a slice of 50, so that the caller can look round."""
    return slice_until(deadline) / 1e6
