"""Seeing the death of a process of another rank: its pidfd on the same machine, else a TCP connection.

The kernel accepts the connection for the worker and ends it when the process dies, so no thread of the worker is
needed, and a stopped worker counts as alive. A connection that the network has cut is made again: who refuses it is
dead, and who cannot be reached for half a minute counts as dead too.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import time
from typing import Any

from ....memory.system.process import Peers, pid_of
from ..location import Place, Site, here

_PAUSE = 1.0  # seconds between two attempts to connect
_CUT_OFF = 30.0  # seconds; a machine that has crashed says nothing at all
_ENDS = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EBADF)
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)  # no process listens there any more


class Beacon:
    """The worker's side: a socket that the kernel closes when the process dies.

    Args:
        store: through which the trainer's host can be reached: the address that leads there is the one to listen on.
    """

    def __init__(self, store: Any) -> None:
        self._socket: socket.socket | None = None
        self.address: tuple[str, int] | None = None
        found = _address_towards(store)
        if found is not None:
            family, address = found
            self._socket = socket.create_server((address, 0), family=family, backlog=64)
            self._socket.setblocking(False)
            self.address = self._socket.getsockname()[:2]
        self._watchers: list[socket.socket] = []

    def tend(self) -> None:
        """Make room for new watchers. The kernel keeps 64 that were not accepted."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # no connection waits
                while True:
                    watcher, _ = self._socket.accept()
                    watcher.setblocking(False)
                    self._watchers = [each for each in self._watchers if not _drop_if_ended(each)]
                    self._watchers.append(watcher)

    def close(self) -> None:
        """Stop. The trainer takes the worker for dead then."""
        if self._socket is not None:
            self._socket.close()
        for watcher in self._watchers:
            watcher.close()


def _drop_if_ended(connection: socket.socket) -> bool:
    try:
        ended = not connection.recv(1)
    except OSError as error:  # nothing is there; or no memory, which is no end: closing would tell of a death
        ended = error.errno in _ENDS
    if ended:
        connection.close()
    return ended


def _address_towards(store: Any) -> tuple[socket.AddressFamily, str] | None:
    """The address under which the store's host knows this one; None when it cannot be known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with contextlib.suppress(OSError, AttributeError):
        for family, _, _, _, address in socket.getaddrinfo(store.host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                return family, str(probe.getsockname()[0])
    return None


class Lifeline:
    """The sender's side: does that process still live?"""

    def __init__(self, place: Place, address: tuple[str, int] | None) -> None:
        self._place = place
        self._peers: Peers | None = None
        self._address: tuple[str, int] | None = None
        self._socket: socket.socket | None = None
        self._connected = False
        self._next_attempt = 0.0
        self._cut_off: float | None = None  # since when; None: it is not, or was never reached
        self._ended = False
        if place.sees_processes_of(here()):
            self._peers = Peers()
        elif address is not None and (place.boot_id == here().boot_id or not _is_loopback(address)):
            self._address = address
            self._connect()

    @property
    def site(self) -> Site:
        """Where the process runs."""
        return Site.of(self._place)

    @property
    def dead(self) -> bool:
        """Has the process ended, as far as can be known? Never waits."""
        if not self._ended:
            if self._peers is not None:
                self._ended = not self._peers.alive(self._place.owner)
            elif self._address is not None:
                self._look()
                if self._cut_off is not None and time.monotonic() - self._cut_off > _CUT_OFF:
                    self._ended = True
        return self._ended

    def _connect(self) -> None:
        assert self._address is not None
        self._next_attempt = time.monotonic() + _PAUSE
        self._connected = False
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no descriptor is free: nothing is known, and the next attempt will tell
            return
        self._socket.setblocking(False)
        for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
            self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self._socket.connect(self._address)
        except BlockingIOError:
            pass  # _look() sees to it
        except OSError as error:
            self._lose(error.errno)

    def _look(self) -> None:
        if self._socket is None:
            if time.monotonic() >= self._next_attempt:
                self._connect()
            return
        poller = select.poll()
        poller.register(self._socket, select.POLLIN if self._connected else select.POLLOUT)
        if not poller.poll(0):
            if not self._connected and time.monotonic() > self._next_attempt + _PAUSE:
                self._lose(None)  # the kernel's own attempts come ever more rarely
            return
        if not self._connected:
            if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._lose(error)
            else:
                self._connected = True
                self._cut_off = None
            return
        try:
            self._ended = not self._socket.recv(1)  # nothing is ever sent: only an end is news
        except OSError as failure:
            self._cut_off = time.monotonic()
            self._lose(failure.errno)

    def _lose(self, error: int | None) -> None:
        """The connection has failed."""
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        self._ended = error in _REFUSED  # else the network, or a firewall

    def close(self) -> None:
        """Watch no more."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        if self._socket is not None:
            self._socket.close()
        self._socket = self._address = None

    def __str__(self) -> str:
        return f"pid {pid_of(self._place.owner)} on node {self._place.node}"


def _is_loopback(address: tuple[str, int]) -> bool:
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
