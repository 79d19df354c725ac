"""A socket between the trainer and one worker: it wakes the worker for new weights, and brings failures to the trainer.

The pipes of a collector belong to its runner, so a scheme has these sockets instead. The trainer listens at a name
(trainer/worker_connections.py) and each worker connects to it (worker/worker_connection.py). SOCK_SEQPACKET keeps
messages whole. Weights never travel over a connection, and acks are in the reader table.

    worker → trainer    HELLO: (worker index, owner word of its process), then any number of Failure
    trainer → worker    WAKE: look for a newer version in your arena; or the handle of an arena to move to
"""

from __future__ import annotations

import errno
import os
import socket
import struct

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
