"""Does a source fit an arena? Keys, shapes, dtypes, devices and ties are compared before anything is written.

Ties: a module whose head.weight is its emb.weight needs the values of one of these names alone, as in a checkpoint that
saves a shared tensor once. Where the two are not one tensor, a missing name is a missing weight, and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from glob import escape
from typing import Any

import torch

from ... import _native
from ...memory.arena import Arena
from ...memory.devices import has_address
from ...memory.manifest import Key, Leaf, same_order, tie
from .leaf_check import extent, problem_with


def direct(tensor: torch.Tensor, leaf: Leaf) -> bool:
    """Can the host copy its bytes to the leaf, and the leaf's to it, as they are? Its shape is the leaf's."""
    return tensor.device.type == "cpu" and same_layout(tensor, leaf)


def same_layout(tensor: torch.Tensor, leaf: Leaf) -> bool:
    """Are its bytes those of the leaf, wherever they are? Its shape is the leaf's."""
    return (
        tensor.dtype == leaf.dtype
        and ((strides := tensor.stride()) == leaf.strides or same_order(leaf.shape, strides, leaf.strides))
        and (_native.surely_plain(tensor) or not (tensor.is_conj() or tensor.is_neg()))
    )


def mismatches(tensors: Mapping[Key, Any], arena: Arena, *, partial: bool, source_is: str = "source") -> list[str]:
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
            if value.shape != leaf.shape:
                problems.append(f"{name} is {leaf.shape} in the arena but {tuple(value.shape)} in the {source_is}")
            # What is published may be cast on its way, but a module computes in the dtype it was built for.
            castable = source_is == "source" and value.dtype.is_floating_point
            if value.dtype != leaf.dtype and not (castable and leaf.cast):
                more = ": the arena casts it" if leaf.cast and source_is == "adopted module" else ""
                if castable and leaf.dtype.is_floating_point:
                    more = f'; make the scheme or the publisher with dtype={{"*": {leaf.dtype}}} to have it cast'
                problems.append(f"{name} is {leaf.dtype} in the arena but {value.dtype} in the {source_is}{more}")
    if not partial:
        given = {
            manifest.by_key[key].offset for key in tensors if key in manifest.by_key and manifest.by_key[key].nbytes
        }
        absent = [
            leaf.name  # a second name of one that is there is not needed
            for key, leaf in manifest.by_key.items()
            if key not in tensors and not (leaf.nbytes and leaf.offset in given and source_is == "source")
        ]
        problems += [f"{name} is missing from the {source_is}" for name in absent]
    return problems


def elsewhere(tensors: Mapping[Key, torch.Tensor], arena: Arena) -> list[str]:
    """A line for each tensor of a module that cannot be the arena's own memory, since torch has it elsewhere."""
    return [
        f"{'.'.join(key)} is on {arena.torch_device} in the arena but on {tensor.device} in the module"
        for key, tensor in tensors.items()
        if key in arena.manifest.by_key and tensor.device.type != "meta" and tensor.device != arena.torch_device
    ]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN, unlike with torch.equal."""
    if a.numel() == 0:
        return True
    if a.device != b.device:
        b = b.to(a.device)
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def untied(tensors: Mapping[Key, torch.Tensor], arena: Arena) -> list[tuple[Leaf, Leaf]]:
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
    """Leaves that are separate in the arena but one tensor here, which could show only one of them."""
    first: dict[int, Leaf] = {}
    leaves = ((tensors[leaf.key], leaf) for leaf in arena.manifest.leaves if leaf.key in tensors and leaf.nbytes)
    return [
        f"{first[id(tensor)].name} and {leaf.name} are separate in the arena but one tensor in the {source_is}"
        for tensor, leaf in leaves
        if first.setdefault(id(tensor), leaf).offset != leaf.offset
    ]


def dtype_cure(tensors: Mapping[Key, torch.Tensor], arena: Arena, problems: list[str]) -> str:
    """What to write where a module and an arena differ by the dtypes of floating leaves alone; else nothing."""
    floating = [leaf for leaf in arena.manifest.leaves if leaf.dtype.is_floating_point and leaf.key in tensors]
    wanted = {leaf.name: tensors[leaf.key].dtype for leaf in floating}
    differing = sum(wanted[leaf.name] != leaf.dtype for leaf in floating)
    if not differing or differing != len(problems) or not all(dtype.is_floating_point for dtype in wanted.values()):
        return ""
    usual = Counter(wanted.values()).most_common(1)[0][0]
    patterns = {escape(name): dtype for name, dtype in wanted.items() if dtype != usual} | {"*": usual}
    pairs = ", ".join(f'"{pattern}": {dtype}' for pattern, dtype in patterns.items())
    return (
        f"\nThey differ by dtype alone. Cast in the trainer: Publisher(..., dtype={{{pairs}}}) or the scheme's dtype=; "
        "or give the worker's module the dtypes of the arena."
    )


def describe_problems(problems: list[str], arena: str, source: str) -> str:
    """All problems in one message, with the next step."""
    lines = "".join(f"\n  {problem}" for problem in problems)
    return (
        f"{len(problems)} difference(s) between {arena} and {source}; nothing was written. Make them agree, or "
        f"create a new arena:{lines}"
    )


def second_names(tensors: Mapping[Key, Any], known: Container[Key]) -> dict[Key, Key]:
    """For each of these keys that is not known: a known one under which there is the same tensor."""
    unknown = [key for key in tensors if key not in known]
    first: dict[Any, Key] = {}
    for key, tensor in tensors.items() if unknown else ():
        if key in known:
            first.setdefault(identity(tensor), key)
    return {key: found for key in unknown if (found := first.get(identity(tensors[key]))) is not None}


def identity(tensor: Any) -> Any:
    """Equal for tensors that are one: the same object, or the same memory seen in the same way."""
    return (tie(tensor) if isinstance(tensor, torch.Tensor) else None) or id(tensor)


def overlapping(tensors: Mapping[str, torch.Tensor], moving: Set[int]) -> list[tuple[str, str]]:
    """Names of those that share memory with one of the `moving` (ids), but for moving ones that are tied."""
    # One of several that show the same memory in the same way stands for all: they would be compared pairwise.
    shown: dict[object, tuple[int, int, str]] = {}
    for name, each in tensors.items():
        if has_address(each) and each.numel():
            begin = each.data_ptr()
            span = begin, begin + extent(each) * each.element_size(), name
            shown.setdefault((tie(each), id(each) in moving), span)
    found = []
    reaching: list[tuple[int, str]] = []  # (end, name) of those that reach beyond where the next one begins
    for begin, end, two in sorted(shown.values()):
        reaching = [each for each in reaching if each[0] > begin]
        found += [(one, two) for _, one in reaching]
        reaching.append((end, two))
    moves = [(pair, [id(tensors[name]) in moving for name in pair]) for pair in found]
    return [(a, b) for (a, b), m in moves if any(m) and not (all(m) and tie(tensors[a]) == tie(tensors[b]))]


def shown_by_others(keep: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> bool:
    """Are there more tensors over the slab of these places than those to keep? True if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not places:
        return bool(places)
    slab = places[0].untyped_storage()
    lone = torch.empty(1)
    own = count(lone.untyped_storage()._cdata) - 1  # of the storage object in Python
    shown = {id(tensor) for tensor in keep if tensor.untyped_storage()._cdata == slab._cdata}
    return bool(count(slab._cdata) > len(shown) + own)
