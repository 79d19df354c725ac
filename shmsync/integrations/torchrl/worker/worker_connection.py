"""A socket between the trainer and one worker: it wakes the worker for new weights, and brings failures to the trainer.

The pipes of a collector belong to its runner, so a scheme has these sockets instead. The trainer listens at a name
(trainer/worker_connections.py) and each worker connects to it (WorkerConnection). SOCK_SEQPACKET keeps
messages whole. Weights never travel over a connection, and acks are in the reader table.

    worker → trainer    HELLO: (worker index, owner word of its process), then any number of Failure
    trainer → worker    WAKE: look for a newer version in your arena; or the handle of an arena to move to
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import threading
from contextlib import suppress

from ....engine.outcome import Failure
from ....memory.process import me
from ....memory.segment import Handle
from ....schemes.messages import dumps

WAKE = b"!"
LARGEST = 1 << 16  # bytes of a message
_ENDS = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.EBADF)
_UCRED = struct.Struct("3i")  # pid, uid, gid


def check_uid(connection: socket.socket) -> None:
    """Raise PermissionError when another user is at the other end."""
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.getuid():
        raise PermissionError(f"the other end belongs to user {uid}, not to {os.getuid()}")


def receive(connection: socket.socket, flags: int = 0) -> bytes | None:
    """The next message; None when there is none now, b"" when either side has closed the connection."""
    try:
        return connection.recv(LARGEST + 1, flags)
    except OSError as error:  # no memory for it now, say: that is no end
        return b"" if error.errno in _ENDS else None


class WorkerConnection:
    """A worker's end of the connection. Raises ConnectionError when the trainer cannot be reached."""

    def __init__(self, address: str, worker: int) -> None:
        self._address, self._worker = address, worker
        self._socket = self._connect()
        self._closing = threading.RLock()  # close() and reconnect() exclude each other

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._address)
            check_uid(connection)  # messages are unpickled, and any user may take the name of a trainer that is gone
            connection.send(dumps((self._worker, me().owner)))
        except OSError as error:
            connection.close()
            raise ConnectionError(
                f"worker {self._worker} does not reach its trainer: {error}; is the trainer still there, and on this "
                "machine?"
            ) from error
        connection.setblocking(False)
        return connection

    def reconnect(self) -> bool:
        """Connect again after the trainer's end was closed, perhaps by an interrupt; False when the trainer is gone."""
        with self._closing:
            if self._socket.fileno() < 0:
                return False
            try:
                fresh = self._connect()
            except ConnectionError:
                return False
            # Keep the number: the listener knows the connection by it.
            os.dup2(fresh.fileno(), self._socket.fileno(), inheritable=False)
            fresh.close()
            return True

    @property
    def fd(self) -> int:
        """The descriptor, for poll(); -1 when closed."""
        return self._socket.fileno()

    def take(self) -> Handle | bytes | None:
        """WAKE, or the handle of an arena to move to. None: there is no message now; b"": the connection ended."""
        message = receive(self._socket)
        return Handle(*pickle.loads(message)) if message and message != WAKE else message

    def report(self, error: BaseException) -> None:
        """Send an exception that was just caught to the trainer."""
        failure = Failure.of(error)
        message = dumps(tuple(failure))
        if len(message) > LARGEST:
            message = dumps((None, None, failure.summary[:1000], failure.trace[-LARGEST // 4 :]))
        with suppress(OSError):  # the trainer is gone, or has not looked for so long that its buffer is full
            self._socket.send(message, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._closing:
            self._socket.close()
