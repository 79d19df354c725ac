"""Publish in several arenas at once: all of the versions become visible, or none does."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from ..memory.manifest import Key
from .arena_writer import ArenaWriter
from .source.sources import Weights
from .write.publishing import publish_plans


class Publication(NamedTuple):
    """What to publish where."""

    writer: ArenaWriter
    weights: Weights | None
    optional: Container[Key] | None = None  # leaves that may be missing; None: all


def publish_all(publications: Sequence[Publication], version: int | None, deadline: float) -> list[int]:
    """Publish each of these in its arena, all as `version` (None: each as its next), by the monotonic `deadline`.

    Before the first byte moves, every source is checked and every arena has a slot to write. With slots = 1 no
    gate opens before all are closed, so a reader that enters the arenas in this order, one section inside the other,
    sees all of them before or all of them after.

    Returns the versions, which are visible then. Raises as Publisher.publish() does; then nothing was published, but by
    WriterBusy and DeviceFailed for a version whose copies on a device are not done.
    """
    if len(publications) > 1:
        versions = _publish_locked(publications, version, deadline, len(publications))
    else:
        versions = [
            each.writer.publish(each.weights, deadline, version=version, optional=each.optional)
            for each in publications
        ]
    for each in publications:
        side = each.writer.side
        if not side.writes.at_once:  # the caller announces these versions to others
            with side.lock:
                side.ready(deadline)
    return versions


def _publish_locked(publications: Sequence[Publication], version: int | None, deadline: float, left: int) -> list[int]:
    # One `with` inside the other: an interrupt may land anywhere, and would make a loop over the locks, or an
    # ExitStack, lose some.
    if left == 0:
        try:
            for each in publications:
                each.writer.side.ready(deadline)
            plans = [(each.writer.side, each.writer.plan(each.weights, each.optional)) for each in publications]
            return publish_plans(plans, version, deadline)
        finally:
            for each in publications:
                each.writer.plans.release()
    with publications[-left].writer.side.lock:
        return _publish_locked(publications, version, deadline, left - 1)
