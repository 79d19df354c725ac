"""From a source to the bytes in a slot: how each tensor is copied, checked once and found again.

A CopyPlan is made once for a source, and checks all of it: keys, shapes, dtypes, devices, layouts. That costs more than
the copy, so Plans keeps the plans of a publisher. Later uses only check that nothing has changed since (see
native/bind/sources.hpp); otherwise a new plan is made. Autograd's version counters cannot tell what changed: writes
through `.data` or numpy do not move them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from .. import _native
from ..errors import ManifestMismatch
from ..memory.arena import Arena
from ..memory.manifest import Key, Leaf
from ..memory.plainly import run_plainly
from .admission import extent
from .converting import Conversions
from .matching import describe_problems, direct, mismatches, same_bytes, untied
from .sources import Collected, Filter, Weights, collect, not_saved

_native.set_exchange_table(torch.Tensor)


class CopyPlan:
    """A checked source: which tensors are copied, which through a private copy, and which leaves keep their value."""

    def __init__(self, collected: Collected, arena: Arena, name: str, *, partial: bool, any_device: bool) -> None:
        problems = mismatches(collected.tensors, arena, partial=partial, any_device=any_device)
        apart = [] if problems else untied(collected.tensors, arena)
        problems += [
            f"{first.name} and {other.name} are one tensor in the arena but have different values in the source"
            for first, other in apart
            if not same_bytes(collected.tensors[first.key], collected.tensors[other.key])
        ]
        if partial and not collected.tensors:
            problems.append("it gives none of the arena's leaves")
        if problems:
            raise ManifestMismatch(describe_problems(problems, f"arena {name!r}", "the weights given to publish()"))
        self._tensors = collected.tensors
        # Leaf offsets: tied leaves are copied once, by whichever comes first.
        converted: list[tuple[torch.Tensor, Leaf]] = []
        self.in_place: list[Leaf] = []  # the source is the slab itself, at the place where it belongs
        rows = []
        given: set[int] = set()  # offsets
        ranges = arena.ranges()
        for key, tensor in collected.tensors.items():
            leaf = arena.manifest.by_key[key]
            if leaf.nbytes == 0 or leaf.offset in given:
                continue
            given.add(leaf.offset)
            if _own_place(tensor, leaf, ranges, arena.slots, name):
                self.in_place.append(leaf)
                rows.append((tensor, leaf.offset, 0))  # nothing to copy, as long as it stays there
            elif direct(tensor, leaf):
                rows.append((tensor, leaf.offset, leaf.nbytes))
            else:
                converted.append((tensor, leaf))
        self._conversions = Conversions(arena, converted)
        rows += [(copy, leaf.offset, leaf.nbytes) for copy, leaf in self._conversions.staged()]
        self._sources = _native.Sources(list(collected.guards or ()), rows)
        # Tied leaves given as two tensors of equal values may differ the next time.
        self._reusable = collected.guards is not None and not apart
        self.given = frozenset(given)  # the places of the leaves that the source has
        self._manifest = arena.manifest

    def shows(self, tensors: Mapping[Key, Any]) -> bool:
        """Was it made for these very tensors?"""
        return len(tensors) == len(self._tensors) and all(
            self._tensors.get(key) is tensor for key, tensor in tensors.items()
        )

    @property
    def has_parameters(self) -> bool:
        """Are any of its tensors parameters of a module?"""
        return any(isinstance(tensor, nn.Parameter) for tensor in self._tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes that copy_to() writes."""
        return self._sources.bytes + self._conversions.written

    @property
    def whole(self) -> bool:
        """Does the source have every leaf?"""
        return len(self.given) == len(self._manifest.places)

    @property
    def lacking(self) -> list[Leaf]:
        """The leaves that the source has not, which keep their values; of tied ones one."""
        others = {leaf.offset: leaf for leaf in self._manifest.leaves if leaf.nbytes and leaf.offset not in self.given}
        return sorted(others.values(), key=lambda leaf: leaf.offset)

    def still_valid(self, arena: Arena) -> bool:
        """Is the source exactly as it was checked? Addresses may have moved, but not into the slab."""
        return (
            self._reusable
            and self._conversions.unchanged()
            and self._sources.revalidate()
            and not (self._sources.moved and (self.in_place or self._overlaps(arena)))
        )

    def _overlaps(self, arena: Arena) -> bool:
        return any(self._sources.overlaps(begin, end) for begin, end in arena.ranges())

    def stage(self) -> None:
        """Convert beforehand what is small; done before readers are kept out."""
        self._conversions.stage()

    def copy_to(self, address: int, slot: int) -> None:
        """Write the given leaves into this slot, which starts at `address`; plain bytes in one native call."""
        self._conversions.write(slot)
        self._sources.copy_to(address)


def _own_place(tensor: torch.Tensor, leaf: Leaf, ranges: list[tuple[int, int]], slots: int, name: str) -> bool:
    """Is the source this leaf itself (slots = 1)? Raises ManifestMismatch when it lies anywhere else in the slab."""
    if tensor.device.type != "cpu":
        return False
    address = tensor.data_ptr()
    for begin, end in ranges:
        if address >= end or address + extent(tensor) * tensor.element_size() <= begin:
            continue
        if slots == 1 and address - begin == leaf.offset and direct(tensor, leaf):
            return True
        raise ManifestMismatch(
            f"the source of {leaf.name} lies inside arena {name!r} itself, so publishing would read what it "
            "overwrites; publish a clone() of it"
        )
    return False


class Plans:
    """The plans of one publisher, by source.

    Args:
        arena, name: where they copy to.
        filter: which leaves of a module count.
        any_device: sources may lie on other devices than the arena.
    """

    def __init__(self, arena: Arena, name: str, filter: Filter, *, any_device: bool) -> None:
        self._arena = arena
        self._name = name
        self._filter = filter
        self._any_device = any_device
        self._of_modules: weakref.WeakKeyDictionary[nn.Module, CopyPlan] = weakref.WeakKeyDictionary()
        self._of_default: CopyPlan | None = None
        self._of_tensordict = _Recent()

    def find(self, source: Weights, *, default: bool = False) -> CopyPlan:
        """The kept plan if the source has not changed, else a new one. `default`: it is the publisher's own source."""
        if isinstance(source, TensorDictBase):
            return self._find_tensordict(source)
        kept = self._of_default if default else self._of_modules.get(source) if isinstance(source, nn.Module) else None
        if kept is not None and kept.still_valid(self._arena):
            return kept
        plan = self.make(source)
        if default:
            self._of_default = plan
        elif isinstance(source, nn.Module):
            # The plan holds the module's dicts and tensors, not the module: no cycle keeps the key alive.
            self._of_modules[source] = plan
        return plan

    def _find_tensordict(self, source: TensorDictBase) -> CopyPlan:
        collected = functools.cache(lambda: self._collect(source))
        plan = self._of_tensordict.find(source, self._arena, collected)
        if plan is None:
            plan = self.make(source, collected())
            self._of_tensordict.keep(source, plan)
        return plan

    @run_plainly
    def make(self, source: Weights, collected: Collected | None = None) -> CopyPlan:
        """A new plan. Raises ManifestMismatch when the source does not fit; a module must give every leaf."""
        partial = not isinstance(source, nn.Module)
        collected = collected or self._collect(source)
        return CopyPlan(collected, self._arena, self._name, partial=partial, any_device=self._any_device)

    def _collect(self, source: Weights) -> Collected:
        collected = collect(source, self._filter, self._arena.manifest)
        if isinstance(source, nn.Module):
            # Buffers that are never saved: an arena made from a state_dict() lacks them.
            own = {key for key in not_saved(source) if key not in self._arena.manifest.by_key}
            if own:
                kept = {key: tensor for key, tensor in collected.tensors.items() if key not in own}
                collected = collected._replace(tensors=kept)
        return collected

    def forget(self) -> None:
        """Keep no plan, and so no tensor of a source."""
        self._of_default = None
        self._of_modules.clear()
        self._of_tensordict.clear()


class _Recent:
    """The plan for the last TensorDict, good for another one with the same tensors too.

    Each TensorDict.from_module() of a module makes such another one. It keeps no weights alive: when the TensorDict is
    gone, only a plan for a module's parameters stays.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[TensorDictBase] | None = None
        self._plan: CopyPlan | None = None

    def find(self, source: TensorDictBase, arena: Arena, collected: Callable[[], Collected]) -> CopyPlan | None:
        """The kept plan, if it is for these tensors and they have not changed."""
        plan = self._plan
        if plan is None or not plan.still_valid(arena):
            return None
        same = self._source is not None and self._source() is source
        return plan if same or plan.shows(collected().tensors) else None

    def keep(self, source: TensorDictBase, plan: CopyPlan) -> None:
        """Remember the plan of this source, and no other."""
        self.clear()
        self._plan = plan
        self._source = weakref.ref(source, None if plan.has_parameters else self._gone)

    def clear(self) -> None:
        """Forget the plan."""
        self._plan = self._source = None

    def _gone(self, reference: weakref.ref[TensorDictBase]) -> None:
        if self._source is reference:
            self.clear()
