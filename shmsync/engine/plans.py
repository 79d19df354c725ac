"""From a source to the bytes in a slot: how each tensor is copied, checked once and found again.

A CopyPlan is made once for a source, and checks all of it: keys, shapes, dtypes, devices, layouts. Used again, it
only checks that nothing changed (see native/bind/sources.hpp); what changed is planned anew. Checking and laying out a
source costs more than copying it, so Plans keeps the plans of a publisher. Never guess from autograd's version counters
what changed: writes through `.data` or numpy do not move them.
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
from .matching import describe_problems, direct, mismatches, same_bytes, untied
from .sources import Collected, Filter, Weights, collect

_native.set_exchange_table(torch.Tensor)


class CopyPlan:
    """A checked source: which of its tensors are copied, which are staged first, which leaves it leaves alone."""

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
        self._staged: list[tuple[torch.Tensor, torch.Tensor, torch.dtype]] = []  # (source, private copy, its dtype)
        self.in_place: list[Leaf] = []  # the source is the slab itself, at the place where it belongs
        rows = []
        given: set[int] = set()
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
                copy = torch.empty(leaf.shape, dtype=leaf.dtype)
                self._staged.append((tensor, copy, tensor.dtype))
                rows.append((copy, leaf.offset, leaf.nbytes))
        self._sources = _native.Sources(list(collected.guards or ()), rows)
        # Tied leaves given as two tensors of equal values may differ the next time.
        self._reusable = collected.guards is not None and not apart
        others = {leaf.offset: leaf for leaf in arena.manifest.leaves if leaf.nbytes and leaf.offset not in given}
        self.carried = sorted(others.values(), key=lambda leaf: leaf.offset)  # not given: keep the current value

    def shows(self, tensors: Mapping[Key, Any]) -> bool:
        """Was it made for these very tensors?"""
        return len(tensors) == len(self._tensors) and all(
            self._tensors.get(key) is tensor for key, tensor in tensors.items()
        )

    @property
    def has_parameters(self) -> bool:
        """Are there a module's own among its tensors?"""
        return any(isinstance(tensor, nn.Parameter) for tensor in self._tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes that copy_to() moves."""
        return self._sources.bytes

    @property
    def whole(self) -> bool:
        """Does it give every leaf?"""
        return not self.carried

    def still_valid(self, arena: Arena) -> bool:
        """Is the source exactly as it was checked? Addresses may have moved, but not into the slab."""
        return (
            self._reusable
            and all(
                source.shape == copy.shape and source.dtype == dtype and source.layout is torch.strided
                for source, copy, dtype in self._staged
            )
            and self._sources.revalidate()
            and not (self._sources.moved and (self.in_place or self._overlaps(arena)))
        )

    def _overlaps(self, arena: Arena) -> bool:
        return any(self._sources.overlaps(begin, end) for begin, end in arena.ranges())

    def stage(self) -> None:
        """Cast, gather or fetch what cannot be copied as plain bytes; done before readers are kept out."""
        if self._staged:
            with torch.no_grad():
                for source, copy, _ in self._staged:
                    copy.copy_(source)

    def copy_to(self, address: int) -> None:
        """Write the given leaves into the slot that starts at `address`; one native call, without the GIL."""
        self._sources.copy_to(address)


def _own_place(tensor: torch.Tensor, leaf: Leaf, ranges: list[tuple[int, int]], slots: int, name: str) -> bool:
    """Is it the very leaf of slots = 1? Raises when it lies in the slab, but elsewhere."""
    if tensor.device.type != "cpu":
        return False
    address = tensor.data_ptr()
    for begin, end in ranges:
        if address >= end or address + _extent(tensor) <= begin:
            continue
        if slots == 1 and address - begin == leaf.offset and direct(tensor, leaf):
            return True
        raise ManifestMismatch(
            f"the source of {leaf.name} lies inside arena {name!r} itself, so publishing would read what it "
            "overwrites; publish a clone() of it"
        )
    return False


def _extent(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.dtype.itemsize


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
        """The plan for this source: the one made before if nothing about it changed. `default`: the publisher keeps
        this source, so its plan is kept too, of whatever type it is."""
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

    def make(self, source: Weights, collected: Collected | None = None) -> CopyPlan:
        """A new plan. Raises ManifestMismatch when the source does not fit; a module must give every leaf."""
        partial = not isinstance(source, nn.Module)
        collected = collected or self._collect(source)
        return CopyPlan(collected, self._arena, self._name, partial=partial, any_device=self._any_device)

    def _collect(self, source: Weights) -> Collected:
        return collect(source, self._filter, self._arena.manifest)

    def forget(self) -> None:
        """Keep no plan, and so no tensor of a source."""
        self._of_default = None
        self._of_modules.clear()
        self._of_tensordict.clear()


class _Recent:
    """The plan for the last TensorDict: for the same one again, or for another that shows the same tensors, as each
    TensorDict.from_module() of a module does.

    It keeps no weights alive: without the TensorDict it keeps only a plan for a module's parameters.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[TensorDictBase] | None = None
        self._plan: CopyPlan | None = None

    def find(self, source: TensorDictBase, arena: Arena, collected: Callable[[], Collected]) -> CopyPlan | None:
        """A plan for this source that is still right."""
        plan = self._plan
        if plan is None or not plan.still_valid(arena):
            return None
        same = self._source is not None and self._source() is source
        return plan if same or plan.shows(collected().tensors) else None

    def keep(self, source: TensorDictBase, plan: CopyPlan) -> None:
        """Remember."""
        self.clear()
        self._plan = plan
        self._source = weakref.ref(source, None if plan.has_parameters else self._gone)

    def clear(self) -> None:
        """Forget."""
        self._plan = self._source = None

    def _gone(self, reference: weakref.ref[TensorDictBase]) -> None:
        if self._source is reference:
            self.clear()
