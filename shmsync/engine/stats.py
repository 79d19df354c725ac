"""What publishers and subscribers report about themselves: frozen dataclasses, times in seconds.

A publisher's figures are counted in publisher.py, write/writer.py and write/slot_writer.py, a subscriber's in
native/src/read_section.cpp and read/reading.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..memory.process import ProcessState
from .deadlines import Latency, Samples


@dataclass(frozen=True)
class PublisherStats:
    """Counts since the publisher was made.

    Attributes:
        version: the published one.
        publishes: publish() calls that committed, the constructor's included.
        updates: update() sections that committed.
        bytes_copied: into the slab, by this process.
        aborted: publishes and updates that were begun and taken back; weights that were refused began none.
        reaped: rows taken back from dead readers.
        publish: a publish(), or an update()'s entry and exit, without the body and the wait for acks.
        pin_wait: of those calls that had to wait for readers.
        ack_wait: of those calls with wait=.
        stalls: calls that found no slot to write in time (ReaderStalled).
    """

    version: int
    publishes: int
    updates: int
    bytes_copied: int
    aborted: int
    reaped: int
    publish: Latency
    pin_wait: Latency
    ack_wait: Latency
    stalls: int = 0


@dataclass
class Counts:
    """The counters of a Writer, by the names that they have in PublisherStats."""

    publishes: int = 0
    updates: int = 0
    bytes_copied: int = 0
    aborted: int = 0
    reaped: int = 0
    stalls: int = 0
    publish: Samples = field(default_factory=Samples)
    pin_wait: Samples = field(default_factory=Samples)
    ack_wait: Samples = field(default_factory=Samples)


@dataclass(frozen=True)
class ReaderInfo:
    """One subscriber, as its row in the reader table shows it.

    Attributes:
        worker: the index given to Subscriber(worker=).
        pid: of its process.
        state: whether that process runs, is stopped or dead.
        acked: the version it has applied; 0: none yet.
        lag: published versions that it has not applied.
        pinned: the version it holds in a read section right now.
        pin_age: since when, in seconds; 0 when it holds none.
        reads: sections entered.
        torn: optimistic or live sections whose weights changed meanwhile.
        retries: entries begun again because the writer moved on meanwhile (a wait at a closed gate is none), and torn
            sections that run(), snapshot() or a bound module repeated.
    """

    worker: int | None
    pid: int
    state: ProcessState
    acked: int
    lag: int
    pinned: int | None
    pin_age: float
    reads: int
    torn: int
    retries: int


@dataclass(frozen=True)
class SubscriberStats:
    """Counts since the subscriber was attached.

    Attributes:
        version: the applied one, whichever thread has applied it.
        latest: the published one.
        lag: published versions that it has not applied.
        reads: sections entered.
        torn: optimistic or live sections whose weights changed meanwhile.
        retries: entries begun again because the writer moved on meanwhile (a wait at a closed gate is none), and torn
            sections that run(), snapshot() or a bound module repeated.
        moves: versions applied.
        wait: of sections that could not be entered at once.
        restarts: arenas of a restarted publisher that it has moved to (follow=True).
    """

    version: int
    latest: int
    lag: int
    reads: int
    torn: int
    retries: int
    moves: int
    wait: Latency
    restarts: int = 0
