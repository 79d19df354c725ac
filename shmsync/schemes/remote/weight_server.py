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
import logging
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ...memory.slab.memfd import MemfdAt
from ...memory.system.calls import poll
from ..link.proved import PROOF, Listener, close_in_child
from ..link.serial_executor import GRACE
from .location import Address, Location
from .packed_weights import Label, PackedWeights

_CHUNK = 4 << 20  # bytes that one worker gets before the next one has its turn
ASK, REPLY = struct.Struct("<qq"), struct.Struct("<q")
TAKE, LEASE, DONE = 1, 2, 3  # what a worker asks: for the bytes; to read where they lie; and that it has read them
ABSENT = -1  # the answer where they have been given up; else it is their number

_log = logging.getLogger("shmsync")


class FetchTicket(NamedTuple):
    """What a worker is sent in place of weights that it fetches itself: these, in a weight server.

    where: gives the location of the calling process, in the same terms as the weight server's.
    memory: where they lie, for a worker that shares memory with the sender.
    seconds: that the send had left when the ticket was made.
    """

    weight_server: Address  # the network's own means carry its secret, never a connection of ours
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
        location: where this process runs.

    Raises OSError when the system does not let it listen there.
    """

    def __init__(self, host: str, location: Location) -> None:
        key = secrets.token_bytes(PROOF)
        listener = Listener(host, key)
        try:
            wake, woken = socket.socketpair()
        except BaseException:
            listener.close()
            raise
        self.pid = os.getpid()
        self._packed: weakref.WeakValueDictionary[int, PackedWeights] = weakref.WeakValueDictionary()
        self._number = 0
        self.at = Address(host, listener.port, key, location)
        for each in (wake, woken):
            close_in_child(each)  # else a child would keep the thread from ending
        service = _Service(listener, woken, self._packed)
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
        self.read = b""
        self.to_send: deque[memoryview] = deque()
        self.reads: dict[int, list[PackedWeights]] = {}  # what it has not done with, by number


class _Service:
    """What the weight server's thread does."""

    def __init__(self, listener: Listener, woken: socket.socket, packed_weights: Any) -> None:
        self._listener = listener
        self._woken = woken
        self._packed = packed_weights
        self._clients: dict[int, _Client] = {}  # by descriptor

    def run(self) -> None:
        """Serve until the weight server is gone."""
        try:
            while True:
                poller = select.poll()
                poller.register(self._woken, select.POLLIN)
                strangers = self._listener.register(poller)
                for fd, client in self._clients.items():
                    poller.register(fd, select.POLLIN | (select.POLLOUT if client.to_send else 0))
                found = dict(poll(poller, 1000.0 if strangers else -1.0))
                for fd, events in found.items():
                    if fd == self._woken.fileno():
                        return
                    if fd in self._clients:
                        self._serve(self._clients[fd], events)
                for connection in self._listener.admit(found):
                    # A worker that is stopped in the middle of a transfer is not gone.
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
                    self._clients[connection.fileno()] = _Client(connection)
        except Exception:
            _log.exception(
                "the thread that hands out weights has ended; they go by the network's own means from now on"
            )
        finally:
            self._listener.close()
            for each in (self._woken, *(client.connection for client in self._clients.values())):
                each.close()

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & ~select.POLLOUT:
                self._hear(client)
            self._send(client)
        except BlockingIOError:
            pass
        except OSError:
            del self._clients[client.connection.fileno()]
            client.connection.close()
            client.reads.clear()  # run() may refer to it while it waits
            client.to_send.clear()

    def _hear(self, client: _Client) -> None:
        heard = client.connection.recv(4096)
        if not heard:
            raise ConnectionResetError
        client.read += heard
        while len(client.read) >= ASK.size:
            asked, number = ASK.unpack_from(client.read)
            client.read = client.read[ASK.size :]
            self._do(client, asked, number)

    def _do(self, client: _Client, asked: int, number: int) -> None:
        if asked == DONE:
            kept = client.reads.get(number)
            if kept:
                kept.pop()
            if not kept:
                client.reads.pop(number, None)
            return
        packed_weights = self._packed.get(number)
        if asked not in (TAKE, LEASE):
            raise ConnectionRefusedError
        client.to_send.append(memoryview(REPLY.pack(ABSENT if packed_weights is None else number)))
        if packed_weights is not None:
            client.reads.setdefault(number, []).append(packed_weights)
            if asked == TAKE:
                client.to_send.append(memoryview(packed_weights.whole.numpy()))

    def _send(self, client: _Client) -> None:
        """As much as the connection takes, and not more than a worker's turn."""
        budget = _CHUNK
        while client.to_send and budget > 0:
            sent = client.connection.send(client.to_send[0][:budget])
            budget -= sent
            if sent == len(client.to_send[0]):
                client.to_send.popleft()
            else:
                client.to_send[0] = client.to_send[0][sent:]
