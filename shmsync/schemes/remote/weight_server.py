"""The sender's end of shmsync's own connections: workers fetch from it the bytes of the weights that a call announced.

The network that a scheme is for keeps control: its calls say which weights are there, and tell which workers applied
them and which are dead. What goes through it is pickled or put into a store, and received into fresh memory each time;
here bytes go straight from the packed weights' memory into memory that the worker has already.

One thread serves all workers and waits for none, so a stopped one delays no other. A worker that connects proves
first that it knows the key, which came with a call. Then it sends numbers of a fixed size, and nothing is unpickled.

INV: packed weights that a worker reads stays as it is until the worker says that it is done or its connection ends; the
kernel ends those of a process that dies.
"""

from __future__ import annotations

import _thread
import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ...memory.slab.memfd import MemfdAt
from ..link.proved import NONCE, PROOF, close_in_child, proof
from ..link.serial_executor import GRACE
from .location import Location
from .packed_weights import Label, PackedWeights

_CHUNK = 4 << 20  # bytes that one worker gets before the next one has its turn
_STRANGERS = 64  # that may be connected and have proved nothing yet
_MANNERS = 5.0  # seconds that each of them has
ASK, REPLY = struct.Struct("<qq"), struct.Struct("<q")
TAKE, LEASE, DONE = 1, 2, 3  # what a worker asks: for the bytes; to read where they lie; and that it has read them
ABSENT = -1  # the answer where they have been given up; else it is their number

_log = logging.getLogger("shmsync")


class WeightServerAddress(NamedTuple):
    """The address of a sender's weight server. The network's own means carry the key, never a connection of ours."""

    host: str
    port: int
    key: bytes
    maker: Location  # whose weight server it is


class FetchTicket(NamedTuple):
    """What a worker is sent in place of weights that it fetches itself: these, in a weight server.

    where: gives the location of the calling process, in the same terms as the weight server's maker.
    memory: where they lie, for a worker that shares memory with the sender.
    seconds: that the send had left when the ticket was made.
    """

    weight_server: WeightServerAddress
    number: int
    label: Label
    size: int
    memory: MemfdAt
    where: Callable[[], Location]
    seconds: float


class WeightServer:
    """The packed weights that workers may fetch, as long as they are kept, and the thread that hands them out.

    Args:
        host: the address to listen at.
        maker: where this process runs.

    Raises OSError when the system does not let it listen there.
    """

    def __init__(self, host: str, maker: Location) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=256)
        try:
            wake, woken = socket.socketpair()
        except BaseException:
            listener.close()
            raise
        self.pid = os.getpid()
        self._packed: weakref.WeakValueDictionary[int, PackedWeights] = weakref.WeakValueDictionary()
        self._number = 0
        self.at = WeightServerAddress(host, listener.getsockname()[1], secrets.token_bytes(PROOF), maker)
        service = _Service(listener, woken, self.at.key, self._packed)
        thread = threading.Thread(target=service.run, daemon=True, name="shmsync weight server")
        self._end = weakref.finalize(self, _end, wake, thread)
        # start() waits for the new thread, and an interrupt of that may keep it from ever beginning.
        _thread.start_new_thread(thread.start, ())

    def put(self, packed_weights: PackedWeights) -> int:
        """Let workers fetch it, as long as it is kept; the number to ask for."""
        self._number += 1
        self._packed[self._number] = packed_weights
        return self._number


def _end(wake: socket.socket, thread: threading.Thread) -> None:
    wake.close()
    if thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):  # it has not begun, and will end at once
            thread.join(GRACE)


class _Client:
    """One connection of a worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_bytes(NONCE)
        self.trusted = False
        self.until = time.monotonic() + _MANNERS
        self.read = b""
        self.to_send: deque[memoryview] = deque([memoryview(self.nonce)])
        self.reads: dict[int, list[PackedWeights]] = {}  # what it has not done with, by number


class _Service:
    """What the weight server's thread does."""

    def __init__(self, listener: socket.socket, woken: socket.socket, key: bytes, packed_weights: Any) -> None:
        self._listener = listener
        self._key = key
        self._packed = packed_weights
        self._strangers: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._register(listener, selectors.EVENT_READ, None)
        self._register(woken, selectors.EVENT_READ, self)

    def _register(self, each: socket.socket, events: int, data: Any) -> None:
        close_in_child(each)  # else a child would keep its parent's connections from ending
        self._selector.register(each, events, data)

    def run(self) -> None:
        """Serve until the weight server is gone."""
        try:
            while True:
                for key, events in self._selector.select(_MANNERS if self._strangers else None):
                    if key.data is None:
                        self._let_in()
                    elif key.data is self:
                        return
                    else:
                        self._serve(key.data, events)
                for stranger in [each for each in self._strangers if each.until < time.monotonic()]:
                    self._drop(stranger)
        except Exception:
            _log.exception(
                "the thread that hands out weights has ended; they go by the network's own means from now on"
            )
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # they are sockets
            self._selector.close()

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # no descriptor: it waits
            return
        if len(self._strangers) >= _STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer = _Client(connection)
        self._strangers.append(peer)
        self._register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _drop(self, peer: _Client) -> None:
        self._selector.unregister(peer.connection)
        if not peer.trusted:
            self._strangers.remove(peer)
        peer.connection.close()
        peer.reads.clear()
        peer.to_send.clear()

    def _serve(self, peer: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._hear(peer)
            self._send(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.to_send else 0)
        if self._selector.get_key(peer.connection).events != wanted:
            self._selector.modify(peer.connection, wanted, peer)

    def _hear(self, peer: _Client) -> None:
        heard = peer.connection.recv(4096)
        if not heard:
            raise ConnectionResetError
        peer.read += heard
        if not peer.trusted:
            self._check(peer)
        while peer.trusted and len(peer.read) >= ASK.size:
            asked, number = ASK.unpack_from(peer.read)
            peer.read = peer.read[ASK.size :]
            self._do(peer, asked, number)

    def _check(self, peer: _Client) -> None:
        if len(peer.read) >= PROOF + NONCE:
            given, theirs, peer.read = peer.read[:PROOF], peer.read[PROOF:][:NONCE], peer.read[PROOF + NONCE :]
            if not hmac.compare_digest(given, proof(self._key, b"worker", peer.nonce + theirs)):
                raise ConnectionRefusedError
            peer.trusted = True
            self._strangers.remove(peer)
            peer.to_send.append(memoryview(proof(self._key, b"sender", theirs + peer.nonce)))

    def _do(self, peer: _Client, asked: int, number: int) -> None:
        if asked == DONE:
            kept = peer.reads.get(number)
            if kept:
                kept.pop()
            if not kept:
                peer.reads.pop(number, None)
            return
        packed_weights = self._packed.get(number)
        if asked not in (TAKE, LEASE):
            raise ConnectionRefusedError
        peer.to_send.append(memoryview(REPLY.pack(ABSENT if packed_weights is None else number)))
        if packed_weights is not None:
            peer.reads.setdefault(number, []).append(packed_weights)
            if asked == TAKE:
                peer.to_send.append(memoryview(packed_weights.whole.numpy()))

    def _send(self, peer: _Client) -> None:
        """As much as the connection takes, and not more than a worker's turn."""
        budget = _CHUNK
        while peer.to_send and budget > 0:
            sent = peer.connection.send(peer.to_send[0][:budget])
            budget -= sent
            if sent == len(peer.to_send[0]):
                peer.to_send.popleft()
            else:
                peer.to_send[0] = peer.to_send[0][sent:]
