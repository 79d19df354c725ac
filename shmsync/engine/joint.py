"""Publishing several arenas as one: either each of them gets its new weights, or none does."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from ..memory.manifest import Key
from .publisher import Publisher
from .sources import Weights


class Source(NamedTuple):
    """What to publish where."""

    publisher: Publisher
    weights: Weights | None
    optional: Container[Key] | None = None  # leaves that may be missing; None: all


def publish_jointly(sources: Sequence[Source], version: int | None, deadline: float) -> None:
    """Publish each source in its arena, all as `version`, by the monotonic time `deadline`. None: each as its next.

    Every source is checked, and every arena's slot is free to write, before the first byte moves. With slots = 1 no
    gate opens before all are closed, so a reader that enters the arenas in this order, one section inside the other,
    sees all of them before or all of them after.

    Raises as Publisher.publish() does; then nothing was published.
    """
    _locked(sources, version, deadline, len(sources))


def _locked(sources: Sequence[Source], version: int | None, deadline: float, left: int) -> None:
    # One `with` inside the other: an interrupt may land anywhere, and would make a loop over the locks, or an
    # ExitStack, lose some.
    if left == 0:
        return _publish(sources, version, deadline)
    with sources[-left].publisher._side.lock:
        return _locked(sources, version, deadline, left - 1)


def _publish(sources: Sequence[Source], version: int | None, deadline: float) -> None:
    transfers = [source.publisher._checked(source.weights, source.optional) for source in sources]
    for transfer in transfers:
        transfer.stage()
    sides = [source.publisher._side for source in sources]
    try:
        for side in sides:
            if version is not None:
                side.skip_to(version)
            side.begin(deadline)
    except BaseException:
        for side in sides:
            side.writer.abort()  # nothing is written yet
        raise
    left = list(sides)
    try:
        for source, transfer in zip(sources, transfers, strict=True):
            source.publisher._write(transfer)
        while left:
            left[0].writer.commit()
            del left[0]
    except BaseException:
        for side in left:
            side.undo()
        raise
