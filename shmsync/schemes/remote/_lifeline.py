"""Seeing the death of a process of another rank: its pidfd on the same machine, else a TCP connection.

The worker only listens. The kernel accepts the connection for it and ends it when the process dies, so no thread of
the worker is needed, and a stopped worker counts as alive.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

from ..._process import Peers, pid_of
from ._place import Place, here

_CONNECTING = 2.0  # seconds


class Listener:
    """The worker's side.

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
            self.address = self._socket.getsockname()[:2]

    def close(self) -> None:
        """Stop. The trainer takes the worker for dead then."""
        if self._socket is not None:
            self._socket.close()


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
        self._socket: socket.socket | None = None
        self._ended = False
        if place.sees_processes_of(here()):
            self._peers = Peers()
            return
        if address is None:
            return  # deadlines tell
        try:
            self._socket = socket.create_connection(address, timeout=_CONNECTING)
        except ConnectionRefusedError:
            self._ended = True
        except OSError:  # a firewall, perhaps; then deadlines tell
            return
        else:
            self._socket.setblocking(False)
            for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def dead(self) -> bool:
        """Has the process ended, as far as can be known?"""
        if not self._ended:
            if self._peers is not None:
                self._ended = not self._peers.alive(self._place.owner)
            elif self._socket is not None:
                poller = select.poll()
                poller.register(self._socket, select.POLLIN)
                self._ended = bool(poller.poll(0))  # nothing is ever sent: only an end is news
        return self._ended

    def close(self) -> None:
        """Watch no more."""
        if self._peers is not None:
            self._peers.close()
        if self._socket is not None:
            self._socket.close()

    def __str__(self) -> str:
        return f"pid {pid_of(self._place.owner)} on node {self._place.node}"
