"""How a worker tells the trainer what it failed with. Weights never travel here, and acks are in the reader table.

The pipes of a collector belong to its runner, and a scheme reaches its workers as a pickle, so no pipe could be handed
over under every start method. The trainer has a datagram socket under a name in the abstract namespace instead: there
is nothing to unlink, and the name goes with the process. The kernel keeps datagrams whole and in order.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import weakref
from contextlib import suppress

from ...engine.outcome import Failure
from ...memory.process import close_in_children

_LARGEST = 1 << 16  # bytes of a message
_PATIENCE = 1.0  # seconds that a failure waits while the trainer's queue is full
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Failures:
    """The trainer's end: what workers failed with.

    Attributes:
        address: for report().
    """

    def __init__(self) -> None:
        self.address = f"\0shmsync.{os.getpid()}.{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # each message shows its sender's user
        self._socket.bind(self.address)
        self.close = weakref.finalize(self, self._socket.close)  # idempotent
        close_in_children(self, lambda end: end.close())  # else the name would outlive this process

    def received(self) -> list[tuple[int, Failure]]:
        """What has come, oldest first, with the worker. Messages of other users are dropped, and not unpickled."""
        found: list[tuple[int, Failure]] = []
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_LARGEST, socket.CMSG_SPACE(_UCRED.size))
            except OSError:  # there is none, or this end is closed
                return found
            if [_UCRED.unpack(each[: _UCRED.size])[1] for _, _, each in ancillary] == [os.getuid()]:
                worker, failure = pickle.loads(data)
                found.append((worker, Failure(*failure)))


def reach(address: str, worker: int) -> socket.socket:
    """A worker's end, connected. Raises ConnectionError when the trainer is gone."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        end.settimeout(_PATIENCE)
        end.connect(address)
    except OSError as error:
        end.close()
        raise ConnectionError(
            f"worker {worker} does not reach its trainer: {error}; is it still there, on this machine?"
        ) from error
    return end


def report(address: str, worker: int, error: BaseException) -> None:
    """Send an exception that was just caught. Does nothing when the trainer is gone, or does not look."""
    failure = Failure.of(error)
    message = pickle.dumps((worker, tuple(failure)))
    if len(message) > _LARGEST:
        message = pickle.dumps((worker, (None, None, failure.summary[:1000], failure.trace[-_LARGEST // 4 :])))
    with suppress(OSError), reach(address, worker) as end:
        end.send(message)
