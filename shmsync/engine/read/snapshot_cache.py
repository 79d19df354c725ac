"""The TensorDicts that snapshots were copied into: one that is used again is not checked leaf by leaf.

Most programs reuse one `out`. What was found out about it holds while its dicts have the same tensors, and
those are as they were, which one native call sees (native/bind/sources.hpp). Where anything else has changed, all of it
is checked as if it came for the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...memory.arena import Arena
from ..by_identity import ByIdentity
from .snapshot import Targets

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class SnapshotCache:
    """The Targets of TensorDicts, each as long as its TensorDict lives.

    The plan cache of a publisher cannot hold them: a subscriber has none, and these are targets, with other checks.
    """

    def __init__(self) -> None:
        self._kept: ByIdentity[TensorDictBase, Targets] = ByIdentity()

    def targets(self, out: TensorDictBase | None, arena: Arena) -> Targets:
        """The checked targets for `out`; raises as Targets does."""
        if out is None:
            return Targets(None, arena)
        kept = self._kept.get(out)
        if kept is not None and kept.unchanged():
            return kept
        self._kept.pop(out)  # its table has addresses by now that were not checked
        made = Targets(out, arena)
        if made.unchanged():  # the first look at it, to compare with
            self._kept[out] = made
        return made

    def clear(self) -> None:
        """Keep no tensor of the user's."""
        self._kept.clear()
