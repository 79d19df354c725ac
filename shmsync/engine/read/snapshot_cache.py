"""The TensorDicts that snapshots were copied into: one that is used again is not checked leaf by leaf.

Most programs reuse one `out`. What was found out about it holds while its dicts have the same tensors, and
those are as they were, which one native call sees (native/bind/sources.hpp). Where anything else has changed, all of it
is checked as if it came for the first time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from tensordict import TensorDictBase

from ...memory.arena import Arena
from .snapshot import Targets

_KEPT = 4  # a program may take turns between some


class SnapshotCache:
    """The Targets of the last few TensorDicts, each as long as that lives."""

    def __init__(self) -> None:
        self._kept: list[tuple[weakref.ref[TensorDictBase], Targets]] = []  # the newest first

    def targets(self, out: TensorDictBase | None, arena: Arena) -> Targets:
        """The checked targets for `out`; raises as Targets does."""
        if out is None:
            return Targets(None, arena)
        for kept in self._kept:
            if kept[0]() is out:
                if _as_it_was(kept[1]):
                    return kept[1]
                self._drop(kept[0])  # its table has addresses by now that were not checked
                break
        made = Targets(out, arena)
        if _as_it_was(made):  # the first look at it, to compare with
            self._kept = [(weakref.ref(out, _forgets(self)), made), *self._kept[: _KEPT - 1]]
        return made

    def clear(self) -> None:
        """Keep no tensor of the user's."""
        self._kept = []

    def _drop(self, reference: weakref.ref[TensorDictBase]) -> None:
        self._kept = [kept for kept in self._kept if kept[0] is not reference]


def _forgets(kept: SnapshotCache) -> Callable[[weakref.ref[TensorDictBase]], None]:
    """What a dying TensorDict calls. It holds the keeper weakly: a cycle would wait for the garbage collector."""
    keeper = weakref.ref(kept)

    def forget(reference: weakref.ref[TensorDictBase]) -> None:
        found = keeper()
        if found is not None:
            found._drop(reference)

    return forget


def _as_it_was(targets: Targets) -> bool:
    """Has nothing changed since these were checked? Memory that has not moved lies in no arena that was made since."""
    table = targets.table
    return table is not None and table.revalidate() and not table.moved
