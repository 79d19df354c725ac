"""From a checked source to the bytes in a slot.

A CopyPlan is made once for a source, and checks all of it: keys, shapes, dtypes, devices, layouts. Used again, it
only checks that nothing changed (see native/bind/sources.hpp); what changed is planned anew by its maker. Never
guess from autograd's version counters what changed: writes through `.data` or numpy do not move them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import _native
from ..errors import ManifestMismatch
from ..memory.arena import Arena
from ..memory.manifest import Key, Leaf, tie
from .sources import Collected, problem_with

_native.set_exchange_table(torch.Tensor)


class CopyPlan:
    """A checked source: which of its tensors are copied, which are staged first, which leaves it leaves alone."""

    def __init__(self, collected: Collected, arena: Arena, name: str, *, partial: bool, any_device: bool) -> None:
        problems = mismatches(collected.tensors, arena, partial=partial, any_device=any_device)
        untied = [] if problems else _untied(collected.tensors, arena)
        problems += [
            f"{first.name} and {other.name} are one tensor in the arena but have different values in the source"
            for first, other in untied
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
        self._reusable = collected.guards is not None and not untied
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


def direct(tensor: torch.Tensor, leaf: Leaf) -> bool:
    """Can its bytes be copied to the leaf as they are?"""
    return tensor.dtype == leaf.dtype and plain(tensor)


def plain(tensor: torch.Tensor) -> bool:
    """Do its values lie in memory one after the other, as they are?"""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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


def mismatches(
    tensors: Mapping[Key, Any], arena: Arena, *, partial: bool, any_device: bool, source_is: str = "source"
) -> list[str]:
    """Every way in which these tensors differ from the arena's manifest, one line each."""
    manifest = arena.manifest
    problems = []
    for key, value in tensors.items():
        name = ".".join(key)
        leaf = manifest.by_key.get(key)
        if leaf is None:
            problems.append(f"{name} is not in the arena")
        elif reason := problem_with(value):
            problems.append(f"{name} {reason}")
        else:
            if tuple(value.shape) != leaf.shape:
                problems.append(f"{name} is {leaf.shape} in the arena but {tuple(value.shape)} in the {source_is}")
            castable = manifest.casts and leaf.dtype.is_floating_point and value.dtype.is_floating_point
            if value.dtype != leaf.dtype and not castable:
                problems.append(f"{name} is {leaf.dtype} in the arena but {value.dtype} in the {source_is}")
            if value.device.type != "cpu" and not any_device:
                problems.append(f"{name} is on cpu in the arena but on {value.device} in the {source_is}")
    if not partial:
        absent = [leaf.name for key, leaf in manifest.by_key.items() if key not in tensors]
        problems += [f"{name} is missing from the {source_is}" for name in absent]
    return problems


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN, unlike with torch.equal."""
    if a.numel() == 0:
        return True
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def _untied(tensors: Mapping[Key, torch.Tensor], arena: Arena) -> list[tuple[Leaf, Leaf]]:
    """Leaves that share a place in the arena but not in these tensors."""
    found = []
    first: dict[int, Leaf] = {}
    for key in tensors:
        leaf = arena.manifest.by_key[key]
        if leaf.nbytes:
            other = first.setdefault(leaf.offset, leaf)
            if other is not leaf and tie(tensors[key]) != tie(tensors[other.key]):
                found.append((other, leaf))
    return found


def tied_apart(tensors: Mapping[Key, torch.Tensor], arena: Arena, source_is: str) -> list[str]:
    """The other way round: tensors that are one, and could show only one of two places."""
    first: dict[int, Leaf] = {}
    leaves = ((tensors[leaf.key], leaf) for leaf in arena.manifest.leaves if leaf.key in tensors and leaf.nbytes)
    return [
        f"{first[id(tensor)].name} and {leaf.name} are separate in the arena but one tensor in the {source_is}"
        for tensor, leaf in leaves
        if first.setdefault(id(tensor), leaf).offset != leaf.offset
    ]


def describe_problems(problems: list[str], arena: str, source: str) -> str:
    """All problems in one message, with the next step."""
    lines = "".join(f"\n  {problem}" for problem in problems)
    return (
        f"{len(problems)} difference(s) between {arena} and {source}; nothing was written. Make them agree, or "
        f"create a new arena:{lines}"
    )
