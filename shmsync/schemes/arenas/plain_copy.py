"""Plain TensorDicts of the user's own that every send writes: copied out of the arena, by a table that is kept.

What a publisher has accepted needs no second look: a TensorDict that has the arena's leaves takes all of it, in the
dtypes that it has there. So a send only sees whether the TensorDict still has the tensors that it had, and copies them
in one native call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ... import _native
from ...engine.source.manifest_check import direct
from ...engine.source.sources import EVERYTHING, WatchedDict, Weights, collect
from ...engine.write.writer import Writer
from ...memory.arena import lies_in, readonly_ranges
from ...memory.manifest import Key, Leaf, tie
from ...memory.torch_modes import counts_changes, run_plainly
from ..strategy import unflattened
from ..targets import problem_with_target

_KEPT = 16  # tables: one for each slot, and with partial=True one for each set of leaves that is sent
Pair = tuple[Leaf, torch.Tensor]  # a leaf of the arena, and the tensor that it is copied into


class PlainCopy:
    """The way from one arena into a plain TensorDict. Made by of()."""

    def __init__(self, writer: Writer, watched: list[WatchedDict], pairs: list[Pair]) -> None:
        self._writer = writer
        self._pairs = pairs
        self._good = True
        self._targets = _native.Sources(watched, [(target, 0, target.nbytes) for _, target in pairs])
        self._tables: dict[tuple[int, frozenset[int] | None], tuple[_native.Sources, list[torch.Tensor]]] = {}

    @classmethod
    @run_plainly
    def of(cls, weights: TensorDictBase, writer: Writer, *, partial: bool) -> PlainCopy | None:
        """For a TensorDict that has the arena's leaves as plain bytes; None for any other. `partial`: or has more."""
        collected = collect(weights, EVERYTHING, to_write=True)
        targets = unflattened(collected.tensors)
        arena = writer.arena
        leaves = {tuple(leaf.name.split(".")): leaf for leaf in arena.manifest.leaves}
        if arena.on_device is not None or collected.watched_dicts is None or len(targets) != len(collected.tensors):
            return None
        if not (leaves.keys() <= targets.keys() if partial else leaves.keys() == targets.keys()):
            return None
        pairs = [(leaf, targets[key]) for key, leaf in leaves.items()]
        readonly = readonly_ranges()
        if not all(_takes_bytes(target, leaf) and not lies_in(target, readonly) for leaf, target in pairs):
            return None
        if _tied_apart(targets, leaves):
            return None
        return cls(writer, collected.watched_dicts, [(leaf, target) for leaf, target in pairs if target.numel()])

    def good_for(self, writer: Writer) -> bool:
        """Is it the way from this arena, and has the TensorDict the same tensors, at the same addresses?

        False is for good: the next look would compare with the new addresses, and the tables have the old ones.
        """
        same = self._good and writer is self._writer
        self._good = same and self._targets.revalidate() and not self._targets.moved
        return self._good

    def given(self, weights: Weights) -> frozenset[int]:
        """The offsets of those leaves of the arena that these weights have."""
        manifest = self._writer.arena.manifest
        found = collect(weights, EVERYTHING, manifest).tensors
        return frozenset(manifest.by_key[key].offset for key in found if key in manifest.by_key)

    @run_plainly
    def write(self, given: frozenset[int] | None) -> None:
        """Copy what the arena has now: all of it, or the leaves at these offsets."""
        published = self._writer.weights
        which = id(published), given
        if which not in self._tables:
            if len(self._tables) >= _KEPT:
                self._tables.clear()
            views = collect(published, EVERYTHING).tensors
            pairs = [(leaf, target) for leaf, target in self._pairs if given is None or leaf.offset in given]
            rows = [(views[leaf.key], target.data_ptr(), target.nbytes) for leaf, target in pairs]
            self._tables[which] = _native.Sources([], rows), [target for _, target in pairs]
        table, written = self._tables[which]
        table.copy_to(0)  # each to a separate address
        torch.autograd.graph.increment_version(written)  # as copy_() does, for autograd's checks


def _takes_bytes(target: Any, leaf: Leaf) -> bool:
    """Are the leaf's bytes, copied to where the target begins, its value?"""
    return (
        type(target) in (torch.Tensor, nn.Parameter)  # others may keep their values elsewhere
        and problem_with_target(target) is None
        and tuple(target.shape) == leaf.shape
        and direct(target, leaf)
        and counts_changes(target)
    )


def _tied_apart(targets: Mapping[Key, torch.Tensor], leaves: Mapping[Key, Leaf]) -> bool:
    """Are two targets one tensor, whose leaves may have different values?"""
    first: dict[object, Key] = {}
    for key, target in targets.items():
        identity = tie(target) if key in leaves else None
        if identity is not None and leaves[first.setdefault(identity, key)].offset != leaves[key].offset:
            return True
    return False
