"""A worker's end of the connection to its trainer; see connections.py."""

from __future__ import annotations

import os
import pickle
import socket
import threading

from ....engine.outcome import Failure
from ....engine.source.pickling import small
from ....memory.control.segment import Handle
from ....memory.system.process import me
from ..connections import LARGEST, WAKE, check_uid, receive


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
            connection.send(small((self._worker, me().owner)))
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
        message = small(tuple(failure))
        if len(message) > LARGEST:
            message = small((None, None, failure.summary[:1000], failure.trace[-LARGEST // 4 :]))
        try:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the trainer is gone, or has not looked for so long that its buffer is full

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._closing:
            self._socket.close()
