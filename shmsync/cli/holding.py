"""Readers that block the publisher: their pins leave it no slot to write."""

from __future__ import annotations

from ..memory.observed import ArenaSeen, Condition, ReaderSeen


def holders(seen: ArenaSeen) -> list[ReaderSeen]:
    """The readers that the publisher has to wait for, now or at its next publish; the longest pin first."""
    pinned = [reader for reader in seen.readers if reader.pinned is not None and reader.condition is not Condition.DEAD]
    if len(seen.slots) == 1:
        # For a stopped one the publisher waits with its gate open, so that other readers go on with the old version.
        found = pinned if seen.gated else [reader for reader in pinned if reader.condition is Condition.STOPPED]
    else:
        old = {slot.version for slot in seen.slots if not slot.current and slot.version and not slot.unfinished}
        held = {reader.pinned for reader in pinned}
        free = [slot for slot in seen.slots if not slot.current and (slot.unfinished or slot.version not in held)]
        found = [] if free else [reader for reader in pinned if reader.pinned in old]
    return sorted(found, key=lambda reader: -reader.pin_age)


def slowest(seen: ArenaSeen) -> ReaderSeen | None:
    """The living reader that is furthest behind; None when none is."""
    late = [reader for reader in seen.readers if reader.lag and reader.condition is not Condition.DEAD]
    return max(late, key=lambda reader: (reader.lag, reader.pin_age), default=None)


def name_of(reader: ReaderSeen) -> str:
    """How a sentence names a reader: by its index, or by its process."""
    return f"pid {reader.pid}" if reader.worker is None else f"worker {reader.worker}"
