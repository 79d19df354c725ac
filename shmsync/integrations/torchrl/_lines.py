"""A line from the trainer to each worker: it rings when there are new weights, and carries a worker's failures back.

Collectors keep their pipes to themselves, so these are sockets of our own: one listener in the trainer, which the
workers find by its name. SOCK_SEQPACKET keeps messages whole. No bytes of weights go over them.

    worker → trainer    HELLO: (worker index, owner word of its process), then any number of Failure
    trainer → worker    RING: look for a newer version in your arena; or the handle of an arena to move to
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import Any

from ..._process import me
from ..._segment import Handle
from ...schemes._peer import Peer
from ...schemes._wire import Failure, small

RING = b"!"
LARGEST = 1 << 16  # bytes of a message
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Switchboard:
    """The trainer's end of every line of one scheme.

    Args:
        workers: how many are expected; more may call.
        process_of: gives a worker's Process by index, or None as long as it is not known.
    """

    def __init__(self, workers: int, process_of: Callable[[int], Any]) -> None:
        # In the abstract namespace: nothing to unlink, and gone with the process.
        self.address = f"\0shmsync.{os.getpid()}.{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(max(128, 2 * workers))
        self._listener.setblocking(False)
        self._process_of = process_of
        self._strangers: list[socket.socket] = []  # have called, but not said who they are
        self._lines: dict[int, socket.socket] = {}
        self._owed: dict[int, bytes] = {}  # where to move, for those who have not heard it
        self._peers: dict[int, Peer] = {}
        self._closing = util.Finalize(self, _close, (self._listener, self._strangers, self._lines), exitpriority=15)

    def move(self, worker: int, handle: Handle) -> None:
        """Have the next ring tell a worker to move to another arena; it is not lost when the worker cannot hear."""
        self._owed[worker] = small(tuple(handle))

    def ring(self, workers: Iterable[int]) -> None:
        """Wake these workers, if they have called. One whose buffer is full has rings enough to wake up from."""
        for worker in workers:
            line = self._lines.get(worker)
            if line is None:
                continue
            try:
                line.send(self._owed.get(worker, RING), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                continue  # busy, or gone: its ack is what counts
            self._owed.pop(worker, None)

    def ring_owed(self) -> None:
        """Ring those who have not heard yet that they have to move."""
        self.ring(list(self._owed))

    def answer(self) -> list[tuple[int, Failure]]:
        """Let new callers in, and take what the workers reported since the last time."""
        self._let_in()
        reports = []
        for worker, line in list(self._lines.items()):
            while (message := _receive(line)) is not None:
                if not message:
                    line.close()
                    del self._lines[worker]
                    break
                reports.append((worker, Failure(*pickle.loads(message))))
        return reports

    def peer(self, worker: int) -> Peer | None:
        """A worker's process, if it is known: by the collector, or because it has called."""
        if worker not in self._peers:
            process = self._process_of(worker)
            if process is not None and process.pid is not None:
                self._peers[worker] = Peer(process=process)
        return self._peers.get(worker)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._closing()

    def _let_in(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # nobody (any more); or out of descriptors, then at the next send
                break
            caller.setblocking(False)
            _, uid, _ = _UCRED.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid == os.getuid():  # what a caller sends is unpickled
                self._strangers.append(caller)
            else:
                caller.close()
        for caller in list(self._strangers):
            hello = _receive(caller)
            if hello is None:
                continue
            self._strangers.remove(caller)
            if not hello:
                caller.close()
                continue
            worker, owner = pickle.loads(hello)
            earlier = self._lines.pop(worker, None)
            if earlier is not None:
                earlier.close()
            self._lines[worker] = caller
            if worker not in self._peers and self._process_of(worker) is None:
                self._peers[worker] = Peer(owner=owner)


class Line:
    """The worker's end."""

    def __init__(self, address: str, worker: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(address)
            self._socket.send(small((worker, me().owner)))
        except OSError as error:
            self._socket.close()
            raise ConnectionError(
                f"worker {worker} does not reach its trainer: {error}; is the trainer still there, and on this machine?"
            ) from error
        self._socket.setblocking(False)

    @property
    def fd(self) -> int:
        """For poll(); -1 when it is closed."""
        return self._socket.fileno()

    def take(self) -> list[Handle | None] | None:
        """What came: a handle to move to, or None for each ring. None instead of a list: the trainer hung up."""
        messages: list[Handle | None] = []
        while (message := _receive(self._socket)) is not None:
            if not message:
                return None
            messages.append(None if message == RING else Handle(*pickle.loads(message)))
        return messages

    def report(self, error: BaseException) -> None:
        """Send an exception that was just caught to the trainer."""
        failure = Failure.of(error, None)
        message = small(tuple(failure))
        if len(message) > LARGEST:
            message = small((None, None, failure.summary[:1000], failure.trace[-LARGEST // 4 :]))
        try:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the trainer is gone, or has not looked for so long that its buffer is full

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._socket.close()


def _receive(line: socket.socket) -> bytes | None:
    """The next message; None when there is none now, b"" when the other side hung up."""
    try:
        return line.recv(LARGEST + 1)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _close(listener: socket.socket, strangers: list[socket.socket], lines: dict[int, socket.socket]) -> None:
    for each in (listener, *strangers, *lines.values()):
        each.close()
    strangers.clear()
    lines.clear()
