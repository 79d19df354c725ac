"""How fast versions come: two looks at an arena, some time apart."""

from __future__ import annotations

import time

from ..memory import leftovers
from ..memory.observed import ArenaSeen, Condition, look, look_at_all
from ..memory.process import Peers


def rate(before: ArenaSeen | None, after: ArenaSeen) -> float | None:
    """Versions in a second between two looks at one session; None where they tell nothing."""
    if before is None or not after.readable or before.session != after.session or after.at <= before.at:
        return None
    return max(0, after.version - before.version) / (after.at - before.at)


def look_twice(seconds: float, names: list[str] | None = None) -> list[tuple[ArenaSeen, float | None]]:
    """Arenas, these or all, and their versions per second; one look is enough where no publisher lives."""
    peers = Peers()
    try:
        found = look_at_all(leftovers.names() if names is None else names, peers)
        if seconds <= 0 or not any(seen.readable and seen.owner is Condition.ALIVE for seen in found):
            return [(seen, None) for seen in found]
        time.sleep(seconds)
        pairs = [(first, look(first.name, peers)) for first in found]
        return [(last, rate(first, last) if last.owner is Condition.ALIVE else None) for first, last in pairs if last]
    finally:
        peers.close()
