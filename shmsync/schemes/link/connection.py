"""One end of a duplex multiprocessing.Pipe, read and written without ever blocking.

Connection.send() blocks while the other side does not read, and Connection.recv() while half a message is there; with a
peer that was stopped or killed that may never end. The frames here are those of Connection, so the other side may be a
plain one, and so may this side between two messages. Bytes move in native code (native/include/shmsync/frames.hpp),
where no Python signal handler runs, so an interrupt loses neither a message nor the place in the stream.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import stat
import threading
import weakref
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from ... import _native
from ...engine.deadlines import slice_until
from ...memory.process import poll, refusals

_log = logging.getLogger("shmsync")


class Channel:
    """Whole messages in and out. Made once for a connection, by of(); holds it weakly, and borrows its descriptor."""

    def __init__(self, connection: Connection) -> None:
        self.fd = connection.fileno()
        with refusals("looking at a worker's pipe"):
            mode = os.fstat(self.fd).st_mode
        if not stat.S_ISSOCK(mode):
            raise ValueError("weights are sent and answered over one pipe: use multiprocessing.Pipe(duplex=True)")
        self.frames = _native.Frames(self.fd)
        self.pending: deque[Any] = deque()  # messages that are not about weights
        self.role: Any = None  # the SenderEnd or the WorkerEnd that reads it
        self.lock = threading.RLock()  # several models, and so several threads, may share a pipe
        self._connection = weakref.ref(connection)
        self.arrived: list[bytes] = []  # read, and not yet where it belongs

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

    @property
    def ended(self) -> bool:
        """Is the other end closed, as far as it was noticed? What it sent before can still be read."""
        return self.frames.ended

    @property
    def garbage(self) -> str:
        """What came that is no message, after which nothing can be read; "" if all is well."""
        size = self.frames.garbage
        return "" if size is None else f"a header that announces a message of {size:,} bytes, which cannot be one"

    @property
    def partial(self) -> str:
        """How much of an incomplete message has arrived, in words; "" without one."""
        incoming = self.frames.incoming
        return "" if incoming is None else f"{incoming[0]:,} of the {incoming[1]:,} bytes of a message of its own"

    @property
    def unsent(self) -> bool:
        """Is there something that flush() has to send?"""
        return self.frames.unsent

    @property
    def idle(self) -> bool:
        """Is no message half sent or half read, and none read that has not arrived where it belongs?"""
        return self.frames.idle and not self.arrived

    @property
    def readable(self) -> bool:
        """Is there something to read at this moment?"""
        return bool(self.arrived) or (not self.closed and _native.wait_readable(self.fd, 0))

    def send(self, payload: bytes) -> None:
        """Send a message, as far as it goes; flush() sends the rest."""
        with self.lock:
            self.check_open()
            self.frames.send(payload)

    def flush(self) -> None:
        """Write what the pipe takes now."""
        with self.lock:
            if self.frames.unsent:
                self.check_open()
                self.frames.flush()

    def peek(self) -> tuple[Any] | None:
        """The next message, in a tuple of one; None if no whole one is there. Raises EOFError at the end.

        It is given again until it is taken out of `arrived`. Python runs signal handlers at calls and jumps only: a
        caller that stores it and deletes `arrived[0]`, with no call in between, neither loses nor repeats it. A message
        that cannot be unpickled here is kept in `pending`.
        """
        with self.lock:
            while True:
                if not self.arrived:
                    self.check_open()
                    if not self.frames.read_into(self.arrived):
                        if self.frames.ended:
                            raise EOFError("the other end of the pipe is closed")
                        return None
                payload = self.arrived[0]
                try:
                    return (pickle.loads(payload),)
                except Exception as error:
                    _log.warning("a message of %d bytes cannot be unpickled here, and is kept: %s", len(payload), error)
                self.pending += (payload,)
                del self.arrived[0]

    def take_pending(self) -> list[Any]:
        """The messages that are not about weights, oldest first; each is given once."""
        found = list(self.pending)
        self.pending.clear()
        return found

    def wait(self, deadline: float) -> None:
        """Until there is something to read, or the other end is closed, or the monotonic time is `deadline`."""
        self.check_open()
        poller = select.poll()
        poller.register(self.fd, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        poll(poller, milliseconds(deadline))
        self.flush()

    def check_open(self) -> None:
        """Raise OSError if this end is closed."""
        if self.closed:
            raise OSError("this end of the pipe is closed")


def milliseconds(deadline: float) -> float:
    """From now to a monotonic time, for poll(); at most a slice of 50, so that the caller can look round."""
    return slice_until(deadline) / 1e6
