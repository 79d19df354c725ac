"""TCP connections whose two ends prove that they know one secret, before either reads what the other has sent.

    dialler → listener   a nonce, and the proof of its maker that it knows the secret
    listener → dialler   the same for the dialler's nonce; anything may follow in both directions

INV: a listener takes a nonce once, so a hello that was read on the way opens no second connection.
INV: a forked child holds none of these sockets open: the kernel ends a connection with the process that made it.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import time
import weakref
from collections.abc import Container
from multiprocessing.connection import Connection
from typing import Any

NONCE = 16  # bytes
PROOF = 32
_STRANGERS = 64  # that may be connected and have proved nothing yet
_PATIENCE = 5.0  # seconds that each of them has
_SILENCE = 30.0  # seconds without a sign of the other machine, after which the kernel ends a connection

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_all)


def proof(key: bytes, who: bytes, asked: bytes) -> bytes:
    """That its maker knows the key, for a peer who asked with fresh random bytes."""
    return hmac.digest(key, who + asked, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", int(_SILENCE * 1000))):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def connection_of(proved: socket.socket) -> Connection:
    """A socket that a Listener or a Dial gave, as a connection for whole messages."""
    connection = Connection(proved.detach())
    _open.add(connection)
    return connection


class Listener:
    """Lets in who knows the secret. Raises OSError when the system does not let it listen there.

    No method waits, but for 10 ms when a connection has come and no descriptor is free for it.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=256)
        _open.add(self)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._secret = secret
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}  # what each has sent, and until when it may
        self._nonces: set[bytes] = set()

    def register(self, poller: Any) -> bool:
        """Let a poll() see what concerns this; is there a stranger, whose time may run out?"""
        for each in self._strangers if len(self._strangers) >= _STRANGERS else (self._socket, *self._strangers):
            poller.register(each, select.POLLIN)
        return bool(self._strangers)

    def admit(self, found: Container[int]) -> list[socket.socket]:
        """The new connections whose other ends have proved that they know the secret.

        `found`: the descriptors that the poll() has found ready.
        """
        try:
            # Others wait in the kernel. Without a connection, accept() may fail for lack of a descriptor too.
            while self._socket.fileno() in found and len(self._strangers) < _STRANGERS:
                stranger, _ = self._socket.accept()
                stranger.setblocking(False)
                _tune(stranger)
                _open.add(stranger)
                self._strangers[stranger] = b"", time.monotonic() + _PATIENCE
        except BlockingIOError:
            pass
        except OSError:
            time.sleep(0.01)  # no descriptor is free: it waits in the kernel
        return [proved for each in list(self._strangers) if (proved := self._look_at(each)) is not None]

    def _look_at(self, stranger: socket.socket) -> socket.socket | None:
        sent, until = self._strangers[stranger]
        try:
            more = stranger.recv(NONCE + PROOF - len(sent))  # and no byte of a frame
            if not more:
                raise ConnectionResetError
            sent += more
            self._strangers[stranger] = sent, until
            if len(sent) < NONCE + PROOF:
                return None
            nonce, given = sent[:NONCE], sent[NONCE:]
            if not hmac.compare_digest(given, proof(self._secret, b"dialler", nonce)) or nonce in self._nonces:
                raise ConnectionRefusedError
            self._nonces.add(nonce)
            stranger.send(proof(self._secret, b"listener", nonce))
        except BlockingIOError:
            if time.monotonic() < until:
                return None
        except OSError:
            pass
        else:
            del self._strangers[stranger]
            return stranger
        del self._strangers[stranger]
        stranger.close()
        return None

    def close(self) -> None:
        """Listen no more. Idempotent."""
        for each in (self._socket, *self._strangers):
            each.close()
        self._strangers.clear()


class Dial:
    """A connection that is being made. No method waits. Raises OSError when it cannot be begun."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        _open.add(self._socket)
        self._socket.setblocking(False)
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self.connected = False  # the kernel of the other machine has accepted it
        self._read = b""
        try:
            _tune(self._socket)
            self._socket.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            self._socket.close()
            raise

    def advance(self) -> socket.socket | None:
        """The connection, once the other end has proved that it knows the secret; None: not yet.

        Raises ConnectionRefusedError when no process listens there, another OSError when it cannot be known.
        """
        try:
            if not self.connected:
                poller = select.poll()
                poller.register(self._socket, select.POLLOUT)
                if not poller.poll(0):
                    return None
                if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                self._socket.send(self._nonce + proof(self._secret, b"dialler", self._nonce))
                self.connected = True
            more = self._socket.recv(PROOF - len(self._read))
            self._read += more
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection before it had proved anything")
            if len(self._read) < PROOF:
                return None
            if not hmac.compare_digest(self._read, proof(self._secret, b"listener", self._nonce)):
                raise ConnectionAbortedError(errno.ECONNABORTED, "the process there does not know the secret")
        except BlockingIOError:
            return None
        except OSError:
            self._socket.close()
            raise
        return self._socket

    def close(self) -> None:
        """Give it up. Idempotent."""
        self._socket.close()
