"""Attaching to an arena: check everything about it before any tensor exists, then take a row of its reader table."""

from __future__ import annotations

import time
from typing import NamedTuple

from .. import _native
from ..errors import ArenaCorrupt, ReaderTableFull
from . import segment, slab
from .arena import Arena
from .manifest import Manifest, fingerprint
from .process import Peers, me


class Attached(NamedTuple):
    """An arena mapped for reading, and this process's row in it."""

    arena: Arena
    writer: int  # the owner word of its publisher
    row: int
    owner: int  # the owner word of this process


def attach(name: str, session: bytes | None, worker: int | None, timeout: float, peers: Peers) -> Attached:
    """Check and map an arena, and take a row of its reader table. `session`: the handle's; None accepts any.

    Raises ArenaNotFound, ArenaCorrupt, WriterDied, ReaderTableFull.
    """
    control, header = segment.attach(name, session, time.monotonic() + timeout)
    text = control.manifest()
    if fingerprint(text) != header.fingerprint:
        raise ArenaCorrupt(
            f"the manifest of arena {name!r} has fingerprint {fingerprint(text):#x} but its header says "
            f"{header.fingerprint:#x}; attach again"
        )
    manifest = Manifest.from_json(text, header.slot_bytes)
    if manifest.slot_bytes != header.slot_bytes:
        raise ArenaCorrupt(f"slots of arena {name!r} are {header.slot_bytes} bytes, not {manifest.slot_bytes}")
    size = slab.slab_bytes(header.slots, header.slot_bytes)
    memory = slab.attach(header.owner, header.slab_fd, header.slab_inode, size, header.session, name)
    arena = Arena(control, memory, manifest, slots=header.slots, session=header.session)
    owner = me().owner
    row = _claim(control, peers, owner, -1 if worker is None else worker, name)
    peers.keep_only({header.owner})  # the pidfds of other readers served _claim() only
    return Attached(arena, header.owner, row, owner)


def _claim(control: _native.Control, peers: Peers, owner: int, worker: int, name: str) -> int:
    row = control.claim(owner, worker)
    if row is not None:
        return row
    for candidate, holder in control.owners():
        if not peers.alive(holder) and control.take_over(candidate, holder, owner, worker):
            return candidate
    count = len(control.owners())
    raise ReaderTableFull(
        f"arena {name!r} has {count} live subscribers, as many as its max_readers; raise max_readers= in the Publisher"
    )


class Release:
    """Gives a row back. Holds no Subscriber, so that it can run after the Subscriber is collected."""

    def __init__(self, attached: Attached, peers: Peers) -> None:
        self._attached, self._peers = attached, peers
        self._done = False

    def __call__(self) -> None:
        """Free the row and release the arena. Idempotent."""
        if self._done:
            return
        self._done = True
        arena, _, row, owner = self._attached
        arena.control.reap(row, owner, owner)  # reaping one's own row frees it
        arena.release()
        self._peers.close()
