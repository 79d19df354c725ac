"""What a line between the trainer and a worker carries: it rings when there are new weights, and brings failures back.

Collectors keep their pipes to themselves, so these are sockets of our own: one listener in the trainer (trainer/
switchboard.py), which the workers find by its name (worker/line.py). SOCK_SEQPACKET keeps messages whole. No bytes of
weights go over them.

    worker → trainer    HELLO: (worker index, owner word of its process), then any number of Failure
    trainer → worker    RING: look for a newer version in your arena; or the handle of an arena to move to
"""

from __future__ import annotations

import os
import socket
import struct

RING = b"!"
LARGEST = 1 << 16  # bytes of a message
_UCRED = struct.Struct("3i")  # pid, uid, gid


def check_uid(line: socket.socket) -> None:
    """Raise PermissionError when another user is at the other end."""
    _, uid, _ = _UCRED.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.getuid():
        raise PermissionError(f"the other end belongs to user {uid}, not to {os.getuid()}")


def receive(line: socket.socket, flags: int = 0) -> bytes | None:
    """The next message; None when there is none now, b"" when the other side hung up."""
    try:
        return line.recv(LARGEST + 1, flags)
    except BlockingIOError:
        return None
    except OSError:
        return b""
