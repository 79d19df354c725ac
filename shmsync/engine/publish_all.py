"""Publish one model in several arenas: every source is checked before the first of them is written."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from ..memory.manifest import Key
from .source.sources import Weights
from .write.writer import Writer


class Publication(NamedTuple):
    """What to publish where."""

    writer: Writer
    weights: Weights
    optional: Container[Key] | None = None  # leaves that may be missing; None: all


def publish_all(publications: Sequence[Publication], version: int | None, deadline: float) -> list[int]:
    """Publish each of these in its arena, one after the other, by the monotonic `deadline`.

    `version`: the number that all of them get; None: each its arena's next. Returns the versions, which are visible
    then. Raises as Publisher.publish() does: for weights that do not fit with nothing published, for an arena that
    cannot be written with the earlier ones published.
    """
    if len(publications) > 1:
        for each in publications:
            each.writer.check_weights(each.weights, each.optional)
    versions = [
        each.writer.publish(each.weights, deadline, version=version, optional=each.optional) for each in publications
    ]
    for each in publications:
        if each.writer.device is not None:  # the caller announces these versions to others
            with each.writer.lock:
                each.writer.ready(deadline)
    return versions
