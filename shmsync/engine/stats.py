"""What publishers and subscribers report about themselves: frozen dataclasses, times in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .. import _native
from ..memory import reader_table
from ..memory.process import Peers, ProcessState, pid_of
from .timing import Latency


@dataclass(frozen=True)
class PublisherStats:
    """Counts since the publisher was made."""

    version: int
    publishes: int  # publish() calls that committed, the constructor's included
    updates: int  # update() sections that committed
    bytes_copied: int  # into the slab, by this process
    aborted: int  # calls that raised before anything was written
    reaped: int  # rows taken back from dead readers
    publish: Latency  # a publish() or update() entry and exit, without the body and the wait for acks
    pin_wait: Latency  # of those calls that had to wait for readers
    ack_wait: Latency  # of those calls with wait=
    stalls: int = 0  # calls that found no slot to write in time: ReaderStalled


@dataclass(frozen=True)
class ReaderInfo:
    """One subscriber, as its row in the reader table shows it."""

    worker: int | None  # the index given to Subscriber(worker=)
    pid: int
    state: ProcessState
    acked: int  # the version it has applied; 0: none yet
    lag: int  # published versions that it has not applied
    pinned: int | None  # the version it holds in a read section right now
    pin_age: float  # seconds; 0 when it holds none
    reads: int
    torn: int
    retries: int


@dataclass(frozen=True)
class SubscriberStats:
    """Counts since the subscriber was attached."""

    version: int  # applied
    latest: int  # published
    lag: int
    reads: int  # sections entered
    torn: int  # optimistic or live sections whose weights changed meanwhile
    retries: int  # attempts to enter that met the writer
    moves: int  # versions applied
    wait: Latency  # sections that could not be entered at once
    restarts: int = 0  # arenas of a restarted publisher that it has moved to (follow=True)


def reader_infos(control: _native.Control, peers: Peers, version: int) -> list[ReaderInfo]:
    """What Publisher.readers() returns; `version` is the published one."""
    rows = reader_table.claimed(control)
    peers.keep_only({row.owner for row in rows})
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return [
        ReaderInfo(
            worker=None if row.worker < 0 else row.worker,
            pid=pid_of(row.owner),
            state=peers.state(row.owner),
            acked=row.acked,
            lag=max(0, version - row.acked),
            pinned=row.pinned or None,
            pin_age=max(0.0, (now - row.pinned_at) / 1e9) if row.pinned else 0.0,
            reads=row.reads,
            torn=row.torn,
            retries=row.retries,
        )
        for row in rows
    ]
