"""A line from the trainer to each worker: it rings when there are new weights, and carries a worker's failures back.

Collectors keep their pipes to themselves, so these are sockets of our own: one listener in the trainer, which the
workers find by its name. SOCK_SEQPACKET keeps messages whole. No bytes of weights go over them.

    worker → trainer    HELLO: (worker index, owner word of its process), then any number of Failure
    trainer → worker    RING: look for a newer version in your arena; or the handle of an arena to move to
"""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from multiprocessing import util
from typing import Any

from ...engine.outcome import Failure
from ...engine.pickling import small
from ...memory.process import Peer, me
from ...memory.segment import Handle

RING = b"!"
LARGEST = 1 << 16  # bytes of a message
Report = tuple[int, Failure]  # from which worker
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Switchboard:
    """The trainer's end of every line of one scheme.

    Args:
        workers: their indices.
        process_of: gives a worker's Process by index, or None as long as it is not known.
    """

    def __init__(self, workers: Collection[int], process_of: Callable[[int], Any]) -> None:
        # In the abstract namespace: nothing to unlink, and gone with the process.
        self.address = f"\0shmsync.{os.getpid()}.{secrets.token_hex(8)}"
        self.ended: dict[int, str] = {}  # how, by worker
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(max(128, 2 * len(workers)))
        self._listener.setblocking(False)
        self._process_of = process_of
        self._unknown = set(workers)  # whose process nobody knows yet
        self._peers: dict[int, Peer] = {}
        self._lines: dict[int, socket.socket] = {}
        self._owed: dict[int, bytes] = {}  # where to move, for those who have not heard it
        self._poll = select.poll()  # all of it: one call tells that nothing has happened
        self._handlers: dict[int, Callable[[], list[Report]]] = {}  # by descriptor
        self._open = {self._listener: None}  # in order: the listener closes first, so that nobody calls again
        self._watch(self._listener.fileno(), self._let_in)
        self._closing = util.Finalize(self, _close, (self._open,), exitpriority=15)

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
                line.send(self._owed.get(worker, RING) if self._owed else RING, _AT_ONCE)
            except OSError:
                continue  # busy, or gone: its ack is what counts
            self._owed.pop(worker, None)

    def ring_owed(self) -> None:
        """Ring those who have not heard yet that they have to move."""
        if self._owed:
            self.ring(list(self._owed))

    def look(self) -> list[Report]:
        """Let new callers in, notice who has ended, and take what workers reported since the last time."""
        if self._unknown:
            self._find_processes()
        reports: list[Report] = []
        for fd, _ in self._poll.poll(0):
            handler = self._handlers.get(fd)
            if handler is not None:
                reports += handler()
            else:  # an earlier one of these closed it, or an interrupt came between
                self._forget(fd)
        return reports

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._handlers.clear()
        self._closing()

    # An interrupt may land between any two lines here. What is half done then is done again at the next look(), and a
    # caller that was lost calls again; but not one that was lost inside accept(), whose descriptor stays open.

    def _watch(self, fd: int, handler: Callable[[], list[Report]]) -> None:
        self._poll.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _drop(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        self._forget(fd)

    def _forget(self, fd: int) -> None:
        try:
            self._poll.unregister(fd)
        except KeyError:
            pass

    def _find_processes(self) -> None:
        for worker in list(self._unknown):
            process = self._process_of(worker)
            if process is not None and process.pid is not None:
                self._know(worker, Peer(process=process))

    def _know(self, worker: int, peer: Peer) -> None:
        self._peers[worker] = peer
        if peer.dead:
            self._end(worker)
        elif peer.fd is not None:
            self._watch(peer.fd, functools.partial(self._end, worker))
        self._unknown.discard(worker)

    def _end(self, worker: int) -> list[Report]:
        """Its process has ended."""
        peer = self._peers[worker]
        self.ended.setdefault(worker, "ended with exit code 0" if peer.finished else f"died: {peer}")
        if peer.fd is not None:
            self._drop(peer.fd)
        return []

    def _let_in(self) -> list[Report]:
        reports: list[Report] = []
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # nobody (any more); or out of descriptors, then at the next send
                return reports
            caller.setblocking(False)
            try:
                _check_uid(caller)  # what a caller sends is unpickled
            except OSError:
                caller.close()
                continue
            self._watch(caller.fileno(), functools.partial(self._greet, caller))
            self._open[caller] = None
            reports += self._greet(caller)

    def _greet(self, caller: socket.socket) -> list[Report]:
        hello = _receive(caller, socket.MSG_PEEK)  # an interrupt may land anywhere: it is taken when all is done
        if hello is None:
            return []
        if not hello:
            self._hang_up(caller)
            return []
        worker, owner = pickle.loads(hello)
        earlier = self._lines.get(worker)
        if worker in self._unknown or worker in self.ended:
            self._know(worker, Peer(owner=owner))
        if not self._peers[worker].dead:
            self.ended.pop(worker, None)
        self._lines[worker] = caller
        self._watch(caller.fileno(), functools.partial(self._listen, worker, caller))
        if earlier is not None and earlier is not caller:
            self._hang_up(earlier)
        self.ring([worker])  # it may have looked at its arena just before a version that it was not woken for
        return self._listen(worker, caller)

    def _listen(self, worker: int, line: socket.socket) -> list[Report]:
        reports: list[Report] = []
        while (message := _receive(line)) is not None:
            if not message:
                self._hang_up(line)
                self._lines.pop(worker, None)
                peer = self._peers.get(worker)
                # A process that dies closes its line a moment before it is gone.
                if peer is not None and peer.ends_within(0.2):
                    self._end(worker)
                else:
                    self.ended.setdefault(worker, "shut its scheme down")
                break
            content = pickle.loads(message)
            if len(content) == len(Failure._fields):  # else it is the HELLO
                reports.append((worker, Failure(*content)))
        return reports

    def _hang_up(self, line: socket.socket) -> None:
        self._drop(line.fileno())
        self._open.pop(line, None)
        line.close()


class Line:
    """The worker's end."""

    def __init__(self, address: str, worker: int) -> None:
        self._address, self._worker = address, worker
        self._socket = self._call()
        self._closing = threading.RLock()  # close() and call_again() exclude each other

    def _call(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect(self._address)
            _check_uid(line)  # what comes is unpickled, and anybody may take the name of a trainer that is gone
            line.send(small((self._worker, me().owner)))
        except OSError as error:
            line.close()
            raise ConnectionError(
                f"worker {self._worker} does not reach its trainer: {error}; is the trainer still there, and on this "
                "machine?"
            ) from error
        line.setblocking(False)
        return line

    def call_again(self) -> bool:
        """After the other side hung up: an interrupt in the trainer may have cost it this line alone. False when the
        trainer is gone."""
        with self._closing:
            if self._socket.fileno() < 0:
                return False
            try:
                fresh = self._call()
            except ConnectionError:
                return False
            # The same number: others know the line by it.
            os.dup2(fresh.fileno(), self._socket.fileno(), inheritable=False)
            fresh.close()
            return True

    @property
    def fd(self) -> int:
        """For poll(); -1 when it is closed."""
        return self._socket.fileno()

    def take(self) -> Handle | bytes | None:
        """The next message: RING, or the handle of an arena to move to; None when there is none now. b"": the trainer
        has hung up."""
        message = _receive(self._socket)
        return Handle(*pickle.loads(message)) if message and message != RING else message

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
        """Hang up. Idempotent."""
        with self._closing:
            self._socket.close()


def _check_uid(line: socket.socket) -> None:
    """Raise PermissionError when another user is at the other end."""
    _, uid, _ = _UCRED.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.getuid():
        raise PermissionError(f"the other end belongs to user {uid}, not to {os.getuid()}")


def _receive(line: socket.socket, flags: int = 0) -> bytes | None:
    """The next message; None when there is none now, b"" when the other side hung up."""
    try:
        return line.recv(LARGEST + 1, flags)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _close(sockets: dict[socket.socket, None]) -> None:
    for each in list(sockets):
        each.close()
    sockets.clear()
