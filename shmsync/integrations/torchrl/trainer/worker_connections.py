"""The trainer's end of the connections to its workers; see worker/worker_connection.py."""

from __future__ import annotations

import functools
import math
import os
import pickle
import secrets
import select
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from multiprocessing import util
from typing import Any

from ....engine.outcome import Failure
from ....memory.process import Peer, poll
from ....memory.segment import Handle
from ....schemes.messages import dumps
from ..worker.worker_connection import WAKE, check_uid, receive

Report = tuple[int, Failure]  # (worker, what it failed with)
_A_MOMENT = 0.2  # seconds from the end of a dying process's connection to the end of the process
_SHUT = "shut its scheme down"
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class WorkerConnections:
    """The trainer's end of every connection of one scheme.

    Args:
        workers: their indices.
        context: the collector, which starts its processes after this is made; or None.
    """

    def __init__(self, workers: Collection[int], context: weakref.ReferenceType[Any] | None) -> None:
        # In the abstract namespace: nothing to unlink, and gone with the process.
        self.address = f"\0shmsync.{os.getpid()}.{secrets.token_hex(8)}"
        self.peers: dict[int, Peer] = {}  # the processes that are known, by worker
        self.ended: dict[int, str] = {}  # how, by worker
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(max(128, 2 * len(workers)))
        self._listener.setblocking(False)
        self._context = context
        self._unknown = set(workers)  # workers whose process is not known yet
        self._connections: dict[int, socket.socket] = {}
        self._moves: dict[int, bytes] = {}  # by worker: the message to move, not sent yet
        self._poll = select.poll()  # of every descriptor: one call shows that nothing has happened
        self._handlers: dict[int, Callable[[], object]] = {}  # by descriptor
        self._reports: list[Report] = []  # since the last look()
        self._open = {self._listener: None}  # in order: the listener closes first, so that no worker connects again
        self._watch(self._listener.fileno(), self._accept)
        self._patience = _A_MOMENT
        self._closing = util.Finalize(self, _close, (self._open,), exitpriority=15)

    def move(self, worker: int, handle: Handle) -> None:
        """Let a worker move to another arena: the handle goes with the next wake() that reaches it."""
        self._moves[worker] = dumps(tuple(handle))

    def wake(self, workers: Iterable[int]) -> None:
        """Wake those of these workers that are connected. One with a full buffer wakes for its unread messages."""
        for worker in workers:
            connection = self._connections.get(worker)
            if connection is None:
                continue
            try:
                connection.send(self._moves.get(worker, WAKE) if self._moves else WAKE, _AT_ONCE)
            except OSError:
                continue  # busy, or gone: its ack is what counts
            self._moves.pop(worker, None)

    def wake_moving(self) -> None:
        """Wake the workers that have not received the message to move yet."""
        if self._moves:
            self.wake(list(self._moves))

    def look(self, deadline: float = math.inf) -> list[Report]:
        """Accept new connections, notice ended workers, and return the failures reported since the last call.

        A worker whose connection ended is given a moment to end too, but not beyond the deadline.
        """
        self._patience = min(_A_MOMENT, max(0.0, deadline - time.monotonic()))
        for worker in list(self._unknown):
            process = self._process_of(worker)
            if process is not None and process.pid is not None:
                self._know(worker, Peer(process=process))
        for fd, _ in poll(self._poll, 0):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
            else:  # closed by a handler before it, or half dropped by an interrupt
                self._drop(fd)
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._handlers.clear()
        self._closing()

    # An interrupt may land between any two lines here. The next look() does again what was half done, and a worker
    # whose connection was lost connects again. Only the descriptor of one lost inside accept() stays open.

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._poll.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _drop(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        with suppress(KeyError):
            self._poll.unregister(fd)

    def _process_of(self, worker: int) -> Any:
        collector = None if self._context is None else self._context()
        processes = getattr(collector, "procs", None) or ()
        return processes[worker] if worker < len(processes) else None

    def _know(self, worker: int, peer: Peer) -> None:
        self.peers[worker] = peer
        if peer.dead:
            self._end(worker)
        elif peer.fd is not None:
            self._watch(peer.fd, functools.partial(self._end, worker))
        self._unknown.discard(worker)

    def _end(self, worker: int) -> None:
        """Note that the process of a worker has ended."""
        peer = self.peers[worker]
        if self.ended.get(worker, _SHUT) == _SHUT:  # there may have been no time to find out that it died
            self.ended[worker] = str(peer)
        if peer.fd is not None:
            self._drop(peer.fd)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # no more callers; or no descriptor is free: the next send tries again
                return
            caller.setblocking(False)
            try:
                check_uid(caller)  # what a caller sends is unpickled
            except OSError:
                caller.close()
                continue
            self._watch(caller.fileno(), functools.partial(self._identify, caller))
            self._open[caller] = None
            self._identify(caller)

    def _identify(self, caller: socket.socket) -> None:
        hello = receive(caller, socket.MSG_PEEK)  # only a peek: _read() takes it, so an interrupt loses nothing
        if hello is None:
            return
        if not hello:
            self._disconnect(caller)
            return
        worker, owner = pickle.loads(hello)
        earlier = self._connections.get(worker)
        if worker in self._unknown or worker in self.ended:
            self._know(worker, Peer(owner=owner))
        self.peers[worker].introduce(owner)
        if not self.peers[worker].dead:
            self.ended.pop(worker, None)
        self._connections[worker] = caller
        self._watch(caller.fileno(), functools.partial(self._read, worker, caller))
        if earlier is not None and earlier is not caller:
            self._disconnect(earlier)
        self.wake([worker])  # it may have looked at its arena just before a version that it was not woken for
        self._read(worker, caller)

    def _read(self, worker: int, connection: socket.socket) -> None:
        while (message := receive(connection)) is not None:
            if not message:
                self._disconnect(connection)
                self._connections.pop(worker, None)
                peer = self.peers.get(worker)
                # The connection of a dying process ends a moment before the process.
                before = time.monotonic()
                if peer is not None and peer.ends_within(self._patience):
                    self._end(worker)
                else:
                    self.ended.setdefault(worker, _SHUT)
                self._patience = max(0.0, self._patience - (time.monotonic() - before))  # one moment for them all
                break
            content = pickle.loads(message)
            if len(content) == len(Failure._fields):  # else it is the HELLO
                self._reports.append((worker, Failure(*content)))

    def _disconnect(self, connection: socket.socket) -> None:
        self._drop(connection.fileno())
        self._open.pop(connection, None)
        connection.close()


def _close(sockets: dict[socket.socket, None]) -> None:
    for each in list(sockets):
        each.close()
    sockets.clear()
