"""A worker's end of shmsync's own connections: fetches the weights that a ticket is for.

A worker that shares memory with the sender reads them where they lie; others receive them into a buffer that they keep.
Both are read by views, which a receiver copies from. As long as one of them lives the sender does not write there, and
the buffer takes no other weights. A process without a receiver gets a private copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch

from ...errors import PublishTimeout, ShmSyncError, WriterDied
from ...memory.slab.memfd import MemfdAt, map_reusable
from ...memory.torch_modes import run_plainly
from ..link.proved import Dial
from ..link.send_lock import SendLock, TryHold
from .location import Address, Site
from .packed_weights import unpack, views_will_do
from .remote_requests import Unreached
from .weight_server import ABSENT, ASK, DONE, LEASE, REPLY, TAKE, FetchTicket

_CONNECT = 2.0  # seconds: a server that does not answer by then cannot be reached
_MAPPINGS = 4  # that a line keeps; a sender uses two buffers in turns


class _Connection:
    """A connection to one weight server. One thread at a time fetches over it."""

    def __init__(self, at: Address, deadline: float) -> None:
        self.lock = SendLock()
        self.ended = False
        self._leases: list[int] = []  # numbers of buffers that are read in place
        self._socket = _connected(at, min(deadline, time.monotonic() + _CONNECT))
        self._mapped: dict[MemfdAt, torch.UntypedStorage] = {}
        self._room: deque[torch.Tensor] = deque(maxlen=1)  # to receive into; of what was received last

    def views(self, ticket: FetchTicket, deadline: float) -> torch.Tensor:
        """The bytes, to read; what says that they are done with goes with the last view of them."""
        storage = self._map(ticket)
        if storage is not None:
            self._ask(LEASE, ticket.number, deadline)
            self._leases.append(ticket.number)
            return _watched(storage.data_ptr(), ticket.size, storage, partial(self._done, ticket.number))
        room = self.copy(ticket, deadline, self._room.pop() if self._room else None)
        return _watched(room.data_ptr(), ticket.size, room, partial(self._room.append, room))

    def copy(self, ticket: FetchTicket, deadline: float, room: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes, in `room` if it has their size, else in new memory."""
        if room is None or room.nbytes != ticket.size:
            room = torch.empty(ticket.size, dtype=torch.uint8, device="cpu")
        self._ask(TAKE, ticket.number, deadline)
        _read(self._socket, memoryview(room.numpy().data), deadline)
        self._socket.sendall(ASK.pack(DONE, ticket.number))
        return room

    def _map(self, ticket: FetchTicket) -> torch.UntypedStorage | None:
        """Where they lie; None for a worker that does not share memory with the sender."""
        if Site.of(ticket.where()) != Site.of(ticket.weight_server.location):
            return None
        found = self._mapped.get(ticket.memory)
        if found is None:
            try:
                found = map_reusable(ticket.memory)
            except (ShmSyncError, OSError):  # another view of the processes, no descriptor: they come as bytes
                return None
            while len(self._mapped) >= _MAPPINGS:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[ticket.memory] = found
        return found

    def _ask(self, what: int, number: int, deadline: float) -> None:
        _wait_until(self._socket, deadline)
        self._socket.sendall(ASK.pack(what, number))
        reply = bytearray(REPLY.size)
        _read(self._socket, memoryview(reply), deadline)
        if REPLY.unpack(reply)[0] == ABSENT:
            raise WriterDied(
                "the sender has given these weights up before they were read; they come again with its next send"
            )

    def _done(self, number: int) -> None:
        """On whatever thread the last view goes. A few bytes are sent whole, or the connection is broken anyway."""
        with contextlib.suppress(OSError):
            self._socket.sendall(ASK.pack(DONE, number))
        self._leases.remove(number)
        if self.ended:
            self.close()

    def look(self) -> bool:
        """Has the other end ended it? Never waits, and reads nothing."""
        if not self.ended:
            poller = select.poll()
            try:
                poller.register(self._socket, select.POLLRDHUP)
                self.ended = bool(poller.poll(0))
            except (OSError, ValueError):  # it was closed meanwhile
                self.ended = True
        return self.ended

    def close(self) -> None:
        """Fetch no more over it. It stays while views exist: its end would give their memory away."""
        self.ended = True
        if not self._leases:
            self._socket.close()


def _connected(at: Address, deadline: float) -> socket.socket:
    """A connection whose other end knows the key. Raises Unreached."""
    try:
        dial = Dial(at.host, at.port, at.secret)
        while (connection := dial.advance()) is None:
            if time.monotonic() >= deadline:
                dial.close()
                raise TimeoutError("no answer")
            dial.wait(deadline)
    except OSError as error:
        raise Unreached(f"{at.host}:{at.port} cannot be reached: {error}") from error
    return connection


def _read(connection: socket.socket, into: memoryview, deadline: float) -> None:
    while into.nbytes:
        _wait_until(connection, deadline)
        got = connection.recv_into(into)
        if not got:
            raise ConnectionResetError("the other end has closed the connection")
        into = into[got:]


def _wait_until(connection: socket.socket, deadline: float) -> None:
    rest = deadline - time.monotonic()
    connection.settimeout(None if math.isinf(rest) else max(rest, 0.001))


def _watched(address: int, size: int, kept: Any, done: Any) -> torch.Tensor:
    """A tensor over memory; `done` is called when the last view of it is gone."""
    memory = (ctypes.c_uint8 * size).from_address(address)
    memory.kept = kept  # type: ignore[attr-defined]
    weakref.finalize(memory, done).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


_lines: dict[Address, _Connection] = {}
_lines_lock = threading.Lock()


def _line_to(at: Address, deadline: float) -> _Connection:
    with _lines_lock:
        found = _lines.get(at)
        if found is not None and not found.ended:
            return found
        forget_ended()
        made = _lines[at] = _Connection(at, deadline)
        return made


def forget_ended() -> None:
    """Give back the connections to senders that have ended them."""
    for at, line in list(_lines.items()):
        if line.look():
            _lines.pop(at, None)
            line.close()


def _forget_all() -> None:
    global _lines_lock
    _lines_lock = threading.Lock()
    for line in _lines.values():
        line.close()
    _lines.clear()


os.register_at_fork(after_in_child=_forget_all)  # a child has no business on its parent's connections


@run_plainly
def fetch(ticket: FetchTicket) -> Any:
    """The weights that a ticket is for.

    Raises Unreached when there is no way to the sender, WriterDied when it is gone or has given them up, PublishTimeout
    when they do not come while the send lasts.
    """
    deadline = time.monotonic() + ticket.seconds
    for _ in range(2):  # a connection of before may have been cut since
        line = _line_to(ticket.weight_server, deadline)
        with TryHold(line.lock, deadline) as hold:
            if not hold.taken:
                raise _late(ticket)
            try:
                whole = line.views(ticket, deadline) if views_will_do(ticket.label) else line.copy(ticket, deadline)
                return unpack(ticket.label, whole)
            except TimeoutError as error:
                line.close()
                raise _late(ticket) from error
            except OSError:
                line.close()
            except BaseException as error:  # an interrupt may have come between a question and its answer
                if not isinstance(error, WriterDied):
                    line.close()
                raise
    raise WriterDied("the sender is gone in the middle of a transfer; its weights come again with its next send")


def _late(ticket: FetchTicket) -> PublishTimeout:
    server = ticket.weight_server
    return PublishTimeout(
        f"the bytes of version {ticket.label.stamp.version} did not come from {server.host}:{server.port} "
        f"within {ticket.seconds:.3g} s; the send is over, and its weights come again with the next one"
    )


def opened(weights: Any) -> Any:
    """Weights as they came, or what a ticket or a reference of Ray's is for. Raises as fetch() does."""
    if isinstance(weights, FetchTicket):
        return fetch(weights)
    if type(weights).__name__ == "ObjectRef":
        import ray

        return ray.get(weights)
    return weights


class Fetched:
    """A ticket that unpickles as the weights, where no code of shmsync is called with it."""

    def __init__(self, ticket: FetchTicket) -> None:
        self._ticket = ticket

    def __reduce__(self) -> tuple[Any, ...]:
        return fetch, (self._ticket,)


def fetched(content: Any) -> Any:
    """The content, as an object that unpickles as the weights: a ticket alone does not."""
    return Fetched(content) if isinstance(content, FetchTicket) else content
