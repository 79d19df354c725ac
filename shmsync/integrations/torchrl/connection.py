"""What the trainer and its workers tell each other beside the weights: failures, and arenas to move to. Both are rare.

The pipes of a collector belong to its runner, and a scheme reaches its workers as a pickle, so no pipe could be handed
over under every start method. Each side has a datagram socket under a name in the abstract namespace instead: there is
nothing to unlink, and the name goes with the process. The worker's name is the trainer's with its index.

    worker → trainer    (worker, Failure as a tuple)
    trainer → worker    the handle of an arena, as a tuple

The kernel keeps datagrams whole and in order, and loses none. Weights never travel here, and acks are in the reader
table.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import time
import weakref
from contextlib import suppress
from typing import Any

from ...engine.outcome import Failure
from ...memory.process import close_in_children

_LARGEST = 1 << 16  # bytes of a message
_PATIENCE = 1.0  # seconds that a failure waits while the trainer's queue is full
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Mailbox:
    """A socket under this name (None: a new one). `peer`: the only name that it talks to.

    Raises ConnectionError when nobody has the name of the peer, or another process has this one.
    """

    def __init__(self, address: str | None = None, peer: str | None = None) -> None:
        self.address = address or f"\0shmsync.{os.getpid()}.{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._closing = weakref.finalize(self, self._socket.close)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # each message shows its sender's user
            self._socket.bind(self.address)
            if peer is not None:
                self._socket.connect(peer)
        except OSError as error:
            self.close()
            raise ConnectionError(
                f"{self.address[1:]} does not reach its trainer: {error}; is the trainer still there, on this machine, "
                "and is this worker_idx used once?"
            ) from error
        self._socket.setblocking(False)
        close_in_children(self, Mailbox.close)  # else the name would outlive this process

    def send_to(self, address: str, message: Any) -> None:
        """Send, if somebody has that name and room for it."""
        with suppress(OSError):
            self._socket.sendto(pickle.dumps(message), address)

    def report(self, worker: int, error: BaseException) -> None:
        """Send an exception that was just caught to the trainer. Does nothing when the trainer is gone."""
        failure = Failure.of(error)
        message = pickle.dumps((worker, tuple(failure)))
        if len(message) > _LARGEST:
            short = (None, None, failure.summary[:1000], failure.trace[-_LARGEST // 4 :])
            message = pickle.dumps((worker, short))
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._socket.send(message)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.005)
                    continue
            except OSError:
                pass
            return

    @property
    def waiting(self) -> bool:
        """Has a message come?"""
        try:
            self._socket.recv(0, socket.MSG_PEEK)
        except OSError:
            return False
        return True

    def receive(self) -> list[Any]:
        """The messages that have come, oldest first. Those of other users are dropped: they are unpickled here."""
        found: list[Any] = []
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_LARGEST, socket.CMSG_SPACE(_UCRED.size))
            except OSError:  # there is none, or this end is closed
                return found
            uids = [
                _UCRED.unpack(each[: _UCRED.size])[1] for _, kind, each in ancillary if kind == socket.SCM_CREDENTIALS
            ]
            if uids == [os.getuid()]:
                found.append(pickle.loads(data))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closing()
