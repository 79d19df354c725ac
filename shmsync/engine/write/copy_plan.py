"""Checked sources: which of their tensors are copied as bytes, which are converted, and which leaves keep their value.

To check all of a source, keys, shapes, dtypes, devices, layouts, costs more than the copy. So a plan is kept, and the
next publish asks one native pass over the source's dicts (native/bind/source_plan.cpp): are keys, classes and what
torch's exchange table shows of each tensor as they were? Addresses may differ, as those of each new state_dict() do,
but they may not lie in the slab. Anything else that differs makes a new plan. Autograd's version counters cannot tell
what changed: writes through `.data` or numpy do not move them.

The native core copies plain bytes of the host; engine/converting.py writes the other leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import _native
from ...errors import ManifestMismatch
from ...memory import arena as arenas
from ...memory.arena import Arena
from ...memory.devices import has_address
from ...memory.manifest import Key, Leaf, Manifest, merged
from ...memory.torch_modes import run_plainly
from ..converting import Conversions
from ..source.leaf_check import extent
from ..source.manifest_check import (
    describe_problems,
    direct,
    mismatches,
    same_bytes,
    same_layout,
    second_names,
    untied,
)
from ..source.sources import Filter, Weights, collect, not_saved
from ..source.wrappers import without

_native.set_exchange_table(torch.Tensor)
_KEPT = 4  # plans: a trainer may alternate between all weights and a part, or between two forms of them


class _Role(NamedTuple):
    """What the native plan does with one tensor of a source."""

    rows: list[tuple[int, int]]  # (offset in the slot, bytes) that are copied from it
    places: list[int]  # of it among the converted
    home: int = 0  # its address, where it is the slab itself at the place where it belongs
    twin: int = 0  # id of the tensor before it that gives their leaf its bytes


class CopyPlan:
    """How the tensors of one checked source get into a slot. match() gives it the tensors, release() drops them.

    Attributes:
        given: the offsets of the leaves that the source has.
        whole: does it have every leaf?
        in_place: is some leaf of it the slab itself, at the place where it belongs?
        conversions: the leaves that cannot be copied as plain bytes of the host. Only they may come from devices.
        nbytes: what copy_to() writes.
    """

    def __init__(self, source: Weights, tensors: dict[Key, Any], arena: Arena, name: str, *, partial: bool) -> None:
        apart = _refuse_misfit(tensors, arena, name, partial=partial)
        self._arena, self._name = arena, name
        # Of a module only this very one: its class may name its tensors by what it has elsewhere.
        self._module = weakref.ref(source) if isinstance(source, nn.Module) else None
        self.given = frozenset(leaf.offset for leaf in map(arena.manifest.by_key.get, tensors) if leaf and leaf.nbytes)
        self.whole = len(self.given) == len(arena.manifest.places)
        self.in_place = False
        converted: list[tuple[torch.Tensor, Leaf]] = []
        roles: dict[int, _Role] = {}  # by id of a tensor
        first: dict[int, Any] = {}  # by offset: tied leaves are copied once, by whichever comes first
        ranges = arena.ranges()
        for key, tensor in tensors.items():
            leaf = arena.manifest.by_key[key]
            role = roles.setdefault(id(tensor), _Role([], []))
            if not leaf.nbytes or first.get(leaf.offset) is tensor:  # or a second name of it
                continue
            if (giver := first.setdefault(leaf.offset, tensor)) is not tensor:
                roles[id(tensor)] = role._replace(twin=id(giver))
            elif _own_place(tensor, leaf, ranges, arena.slots, name):
                roles[id(tensor)] = role._replace(home=tensor.data_ptr())  # nothing to copy, as long as it stays there
                self.in_place = True
            elif direct(tensor, leaf):
                role.rows.append((leaf.offset, leaf.nbytes))
            else:
                role.places.append(len(converted))
                converted.append((tensor, leaf))
        self.conversions = Conversions(arena, converted)
        self._rows = [row for role in roles.values() for row in role.rows] if arena.device_slab is not None else []
        try:
            self._tensors = _native.SourcePlan(source, roles)
            self.kept = not apart  # two tensors of equal values for one leaf may differ the next time
            self._mapped = arenas.mapped_so_far
        except ValueError:  # arrays, numbers and what keeps its tensors elsewhere: a plan for this publish alone
            self.kept = False
            self._tensors = _native.SourcePlan(flat := dict(enumerate(tensors.values())), roles)
            self._tensors.match(flat)
        else:
            self._tensors.match(source)
        self.conversions.tensors = self._tensors
        self.nbytes = self._tensors.bytes + self.conversions.written

    def match(self, source: Weights) -> bool:
        """Is this source as the one that was checked? Then its tensors are the ones that are copied."""
        tensors = self._tensors
        if (self._module is not None and self._module() is not source) or not tensors.match(source) or tensors.away:
            return False
        if not self.conversions.none:
            self.conversions.found(tensors.moved)
        if tensors.moved or self._mapped != arenas.mapped_so_far:
            self._mapped = -1  # until it is seen to be elsewhere
            if tensors.overlaps(self._arena.ranges()):
                return False
            self._mapped = arenas.mapped_so_far
        return True

    def release(self) -> None:
        """Keep no tensor of the source."""
        self._tensors.release()

    @property
    def lacking(self) -> list[Leaf]:
        """The leaves that the source has not, which keep their values; of tied ones one."""
        leaves = self._arena.manifest.leaves
        others = {leaf.offset: leaf for leaf in leaves if leaf.nbytes and leaf.offset not in self.given}
        return sorted(others.values(), key=lambda leaf: leaf.offset)

    def staged(self) -> list[tuple[int, int]]:
        """For a slot on a device: (place in the slot, bytes) of what aside() writes, in order."""
        return merged(sorted([*self._rows, *((leaf.offset, leaf.nbytes) for leaf in self.conversions.from_host)]))

    def aside(self, staging: torch.Tensor) -> None:
        """For a slot on a device: write what lies in the host's memory, as the slot will have it, to staging memory."""
        self._tensors.copy_to(staging.data_ptr())
        self.conversions.write_aside(staging)

    def copy_to(self, address: int, slot: int, *, later: bool = False) -> None:
        """Write the given leaves into this slot, which starts at `address`; plain bytes in one native call.

        `later`: what lies on a device that has pinned the slab may come behind its current stream's work.
        """
        if not self.conversions.none:
            self.conversions.write(slot, later=later)
        self._tensors.copy_to(address)


class PlanCache:
    """Makes plans, and finds them again: the last few of one publisher, the newest first.

    Args:
        arena, name: where they copy to.
        filter: which leaves of a module count.
    """

    def __init__(self, arena: Arena, name: str, filter: Filter | None) -> None:
        self._arena, self._name, self._filter = arena, name, filter
        self._plans: list[CopyPlan] = []

    def find(self, source: Weights) -> CopyPlan:
        """The plan for this source, with its tensors. Call release() on it when it was carried out."""
        for position, plan in enumerate(self._plans):
            if plan.match(source):
                if position:
                    self._plans.insert(0, self._plans.pop(position))
                return plan
            plan.release()
        return self.make(source)

    @run_plainly
    def make(self, source: Weights) -> CopyPlan:
        """A new plan. Raises ManifestMismatch when the source does not fit; a module must give every leaf."""
        partial = not isinstance(source, nn.Module)
        tensors = self.collect(source)
        plan = CopyPlan(source, tensors, self._arena, self._name, partial=partial)
        if plan.kept:
            self._plans = [plan, *self._plans[: _KEPT - 1]]
        return plan

    def collect(self, source: Weights) -> dict[Key, Any]:
        """The tensors of a source by the arena's keys, not yet checked."""
        tensors, known = collect(source, self._arena.manifest, self._filter), self._arena.manifest.by_key
        if isinstance(source, nn.Module):  # buffers that are never saved: an arena made from a state_dict() lacks them
            tensors = without(tensors, not_saved(source).difference(known))
        return without(tensors, second_names(tensors, known))

    def forget(self) -> None:
        """Keep no plan."""
        self._plans.clear()


class DirtyLeaves:
    """What the one writer knows of its slots' bytes; a leaf is named by its offset.

    Nothing is known of a slot that was never written whole, or whose last write did not end in a commit. Everything is
    noted before the first byte is written, so an interrupt at any moment makes the next publish carry too much, never
    too little.
    """

    def __init__(self, manifest: Manifest, slots: int) -> None:
        self._sizes = manifest.places
        self._order = sorted(self._sizes)
        self._of_slot: list[set[int] | None] = [None] * slots  # None: any leaf may be stale
        self._writing = 0

    def begin(self, slot: int, given: frozenset[int] | None) -> list[tuple[int, int]]:
        """A write of these leaves (None: of any) into a slot begins. Call written() when it is committed.

        Returns what to copy from the current slot, as (offset, bytes).
        """
        stale = self._of_slot[slot]
        self._writing = slot
        self._of_slot[slot] = None
        if given is None or len(given) == len(self._sizes):
            self._of_slot = [None] * len(self._of_slot)
            if given is not None:
                return []
        else:
            for known in self._of_slot:
                if known is not None:
                    known.update(given)
        old = self._order if stale is None else sorted(stale)
        return merged((offset, self._sizes[offset]) for offset in old if offset not in (given or ()))

    def written(self) -> None:
        """The write was committed: its slot has the newest of every leaf, and is the current one."""
        self._of_slot[self._writing] = set()


def _refuse_misfit(tensors: Mapping[Key, Any], arena: Arena, name: str, *, partial: bool) -> list[tuple[Leaf, Leaf]]:
    """Raise ManifestMismatch if they do not fit; the leaves that are one in the arena, and two of equal values here."""
    problems = mismatches(tensors, arena, partial=partial)
    apart = [] if problems else untied(tensors, arena)
    problems += [
        f"{first.name} and {other.name} are one tensor in the arena but have different values in the source"
        for first, other in apart
        if not same_bytes(tensors[first.key], tensors[other.key])
    ]
    if partial and not tensors:
        problems.append("it gives none of the arena's leaves")
    if problems:
        raise ManifestMismatch(describe_problems(problems, f"arena {name!r}", "the weights given to publish()"))
    return apart


def _own_place(tensor: torch.Tensor, leaf: Leaf, ranges: list[tuple[int, int]], slots: int, name: str) -> bool:
    """Is the source this leaf itself (slots = 1)? Raises ManifestMismatch when it lies anywhere else in the slab."""
    if not has_address(tensor):
        return False
    address = tensor.data_ptr()
    behind = address + extent(tensor) * tensor.element_size()
    for begin, end in ranges:
        if address >= end or behind <= begin:
            continue
        if slots == 1 and address - begin == leaf.offset and same_layout(tensor, leaf):
            return True
        raise ManifestMismatch(
            f"the source of {leaf.name} lies inside arena {name!r} itself, so publishing would read what it "
            "overwrites; publish a clone() of it"
        )
    return False
