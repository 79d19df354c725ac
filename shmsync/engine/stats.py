"""What publishers and subscribers report about themselves: frozen dataclasses, times in seconds."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from .. import _native
from ..memory import reader_table
from ..memory.process import Peers, ProcessState, pid_of

_KEPT = 4096  # samples per distribution


@dataclass(frozen=True)
class Latency:
    """A distribution of durations in seconds. `count`, `total` and `max` cover the whole life, the percentiles the
    last 4,096 samples; all are 0 while there is none."""

    count: int
    total: float
    p50: float
    p90: float
    p99: float
    max: float


class Samples:
    """Collects durations; adding one costs an append."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._count = 0
        self._total = 0.0
        self._max = 0.0

    def add(self, seconds: float) -> None:
        """Record one duration."""
        self._recent.append(seconds)
        self._count += 1
        self._total += seconds
        if seconds > self._max:
            self._max = seconds

    def latency(self) -> Latency:
        """The distribution so far."""
        ordered = sorted(self._recent) or [0.0]

        def percentile(fraction: float) -> float:
            return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

        return Latency(self._count, self._total, percentile(0.5), percentile(0.9), percentile(0.99), self._max)


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
