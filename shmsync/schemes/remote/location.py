"""Where a process runs, and which processes can share memory with it."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from typing import NamedTuple

from ...memory.system.process import me

NODE_VARIABLE = "SHMSYNC_NODE"


class Place(NamedTuple):
    """A process as others know it. Picklable, and the same in JSON."""

    node: str  # the processes of one node get their weights through one arena
    boot_id: str
    pid_namespace: int
    user: int
    owner: int  # its owner word

    def sees_processes_of(self, other: Place) -> bool:
        """Does one pid mean the same process in both, so that a pidfd tells of a death?"""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)


class Site(NamedTuple):
    """Where processes can share an arena: one node, and one user and process namespace on it."""

    node: str
    boot_id: str
    pid_namespace: int
    user: int

    @classmethod
    def of(cls, place: Place) -> Site:
        """The site of a process."""
        return cls(*place[:4])

    @property
    def relay_name(self) -> str:
        """What errors call its relay."""
        return f"the relay on node {self.node}"


def here(node: str | None = None) -> Place:
    """The calling process. Its node: `node`, else $SHMSYNC_NODE, else one by machine, network and pid namespace."""
    identity = me()
    boot_id = identity.boot_id.hex()
    name = node or os.environ.get(NODE_VARIABLE) or f"{socket.gethostname()}/{boot_id[:8]}-{_namespaces(os.getpid())}"
    return Place(name, boot_id, identity.pid_namespace, os.getuid(), identity.owner)


@lru_cache(maxsize=2)
def _namespaces(pid: int) -> str:
    return "-".join(f"{os.stat(f'/proc/self/ns/{kind}').st_ino:x}" for kind in ("pid", "net"))
