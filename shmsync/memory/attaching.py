"""Attaching to an arena: check everything about it before any tensor exists, then take a row of its reader table."""

from __future__ import annotations

import time
from multiprocessing.util import is_exiting
from typing import NamedTuple

from .. import _native
from ..errors import ArenaNotFound, ReaderTableFull, WriterDied
from . import segment, slab
from .arena import Arena
from .devices import DeviceSlab, of_kind
from .manifest import Manifest
from .process import Peers, me, refusals

_BETWEEN_LOOKS = 0.001  # seconds, while a publisher is started again
_LAST_READS = 50_000_000  # ns; close() has waited longer, this is for what was never closed
_unfinished: list[Arena] = []


class Attached(NamedTuple):
    """An arena mapped for reading, and this process's row in it."""

    arena: Arena
    writer: int  # the owner word of its publisher
    row: int
    owner: int  # the owner word of this process


def attach(
    name: str,
    session: bytes | None,
    worker: int | None,
    timeout: float,
    peers: Peers,
    *,
    pass_over_dead: bool = False,
) -> Attached:
    """Check and map an arena, and take a row of its reader table. See segment.attach().

    `pass_over_dead`: wait for the next arena of this name where a publisher has died, or closes its arena just now.

    Raises ArenaNotFound, ArenaCorrupt, WriterDied, ReaderTableFull, NoSpace.
    """
    deadline = time.monotonic() + timeout
    with refusals(f"attaching to arena {name!r}"):
        while True:
            found = False
            try:
                segment_found = segment.attach(name, session, deadline)
                found = True  # so that what is not there any more is being replaced
                return _mapped(name, *segment_found, worker, peers)
            except (ArenaNotFound, WriterDied) as error:
                passes_over = pass_over_dead and (found or isinstance(error, WriterDied))
                if not passes_over or time.monotonic() >= deadline:
                    raise
            time.sleep(_BETWEEN_LOOKS)


def _mapped(
    name: str,
    control: _native.Control,
    header: _native.Header,
    manifest: Manifest,
    worker: int | None,
    peers: Peers,
) -> Attached:
    """Map the slab that a segment leads to, and take a row."""
    device = of_kind(header.slab_kind, name, header.slab_handle)
    owner = me().owner
    index = -1 if worker is None else worker
    if device is None:
        memory = slab.attach(header, name)
    else:
        memory = slab.Slab(device.open(header.slab_handle, header.slots * header.slot_bytes), None)
    row = _claim(control, peers, owner, index, name)
    try:
        reads = None if device is None else _native.DeviceReads(control, row, owner)
        device_slab = None if device is None else DeviceSlab(device, memory.readonly, reads)
    except BaseException:
        control.reap(row, owner, owner)
        raise
    peers.keep_only({header.owner})  # the pidfds of other readers served _claim() only
    arena = Arena(control, memory, manifest, header.slots, header.session, device_slab)
    return Attached(arena, header.owner, row, owner)


def _claim(control: _native.Control, peers: Peers, owner: int, worker: int, name: str) -> int:
    for row in control.rows() if worker >= 0 else ():
        if row.worker == worker:
            peers.clear_dead(control, row.id)  # else the next publish() would report a worker whose place is taken
    free = control.claim(owner, worker)
    if free is not None:
        return free
    rows = control.rows()
    for row in rows:
        if not peers.alive(row.owner) and control.take_over(row.number, row.owner, owner, worker):
            return row.number
    raise ReaderTableFull(
        f"arena {name!r} has {len(rows)} live subscribers, as many as its max_readers; raise max_readers= in the "
        "Publisher"
    )


class Release:
    """Gives rows back. Holds no Subscriber, so that it can run after the Subscriber is collected."""

    def __init__(self, attached: Attached, peers: Peers) -> None:
        self._attached, self._peers = [attached], peers

    def add(self, attached: Attached) -> None:
        """Free this one too, in the end."""
        self._attached.append(attached)

    def keep_last(self) -> None:
        """Free all but the one that came last."""
        while len(self._attached) > 1:
            _give_back(self._attached[0])
            del self._attached[0]

    def __call__(self) -> None:
        """Free the rows and release the arenas. Idempotent."""
        while self._attached:
            _give_back(self._attached.pop(0))
        self._peers.close()


def _give_back(attached: Attached) -> None:
    arena, _, row, owner = attached
    reads = None if arena.device_slab is None else arena.device_slab.reads
    if reads is not None and not reads.idle and not reads.wait(_LAST_READS):
        _unfinished.append(arena)  # a device still reads there: row and mapping stay until the process ends
        return
    arena.control.reap(row, owner, owner)  # reaping one's own row frees it
    if not is_exiting():  # else a daemon thread may still read, and the memory goes with the process anyway
        arena.release()
