"""What the commands derive from looks at an arena: versions per second, and the readers that block the publisher."""

from __future__ import annotations

import time
from contextlib import closing

from ..errors import ArenaNotFound
from ..memory import leftovers
from ..memory.inspection import ArenaSeen, Condition, ReaderSeen, look, look_at_all
from ..memory.process import Peers


def rate(before: ArenaSeen | None, after: ArenaSeen) -> float | None:
    """Versions in a second between two looks at one session; None where they tell nothing."""
    if before is None or not after.readable or before.session != after.session or after.at <= before.at:
        return None
    return max(0, after.version - before.version) / (after.at - before.at)


def look_twice(seconds: float, names: list[str] | None = None) -> list[tuple[ArenaSeen, float | None]]:
    """Arenas, these or all, and their versions per second; one look is enough where no publisher lives."""
    with closing(Peers()) as peers:
        found = look_at_all(names, peers)
        if seconds <= 0 or not any(seen.readable and seen.owner is Condition.ALIVE for seen in found):
            return [(seen, None) for seen in found]
        time.sleep(seconds)
        pairs = [(first, look(first.name, peers)) for first in found]
        return [(last, rate(first, last) if last.owner is Condition.ALIVE else None) for first, last in pairs if last]


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


def described(reader: ReaderSeen) -> str:
    """How a sentence names a reader: "worker 7 (pid 812, stopped)", "pid 813"."""
    stopped = "stopped" if reader.condition is Condition.STOPPED else ""
    if reader.worker is None:
        return f"pid {reader.pid}" + (stopped and f" ({stopped})")
    return f"worker {reader.worker} (pid {reader.pid}{stopped and ', ' + stopped})"


def not_found(name: str) -> ArenaNotFound:
    """The error for a name that there is no arena of; it lists those that there are."""
    return ArenaNotFound(f"there is no arena {name!r} (any more); there are: {', '.join(leftovers.names()) or 'none'}")
