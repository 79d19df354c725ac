"""Where a process runs, which processes can share memory with it, and under which address others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from functools import lru_cache
from typing import NamedTuple

from ...memory.process import me

NODE_VARIABLE = "SHMSYNC_NODE"
_OUTSIDE = "192.0.2.1"  # an address of no machine (RFC 5737): the way to it leads over the default route


class Location(NamedTuple):
    """A process as others know it. Picklable, and the same in JSON."""

    node: str  # the processes of one node get their weights through one arena
    boot_id: str
    pid_namespace: int
    user: int
    owner: int  # its owner word


class Address(NamedTuple):
    """Where a process listens for connections whose ends prove that they know the secret, and where it runs."""

    host: str
    port: int
    secret: bytes
    location: Location


class Site(NamedTuple):
    """Where processes can share an arena: one node, and one user and process namespace on it."""

    node: str
    boot_id: str
    pid_namespace: int
    user: int

    @classmethod
    def of(cls, location: Location) -> Site:
        """The site of a process."""
        return cls(*location[:4])

    @property
    def relay_name(self) -> str:
        """What errors call its relay."""
        return f"the relay on node {self.node}"


def here(node: str | None = None) -> Location:
    """The calling process. Its node: `node`, else $SHMSYNC_NODE, else one by machine, network and pid namespace."""
    identity = me()
    boot_id = identity.boot_id.hex()
    name = node or os.environ.get(NODE_VARIABLE) or f"{socket.gethostname()}/{boot_id[:8]}-{_namespaces(os.getpid())}"
    return Location(name, boot_id, identity.pid_namespace, os.getuid(), identity.owner)


@lru_cache(maxsize=2)
def _namespaces(pid: int) -> str:
    return "-".join(f"{os.stat(f'/proc/self/ns/{kind}').st_ino:x}" for kind in ("pid", "net"))


def host_towards(host: str) -> str:
    """The address from which this process reaches a host, under which other machines that reach that host reach it.

    That host itself may reach its own name by loopback, which no other machine can: then, and for "", it is the address
    of the default route.
    """
    found = _way_to(host) if host else "127.0.0.1"
    if is_loopback(found) and host not in (found, "localhost"):
        found = _way_to(_OUTSIDE)
    return found


def _way_to(host: str) -> str:
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Is it an address that means another process in each machine or network namespace?"""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
