"""Tensors that share memory: which of a module's do so in part, and whether others show the slab."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ...memory.arena import has_address
from ...memory.manifest import Key, tie
from .leaf_check import extent, problem_with


def overlapping(tensors: Mapping[str, torch.Tensor], moving: Collection[int]) -> list[tuple[str, str]]:
    """Names of those that share memory with one of the `moving` (ids), but do not show all of it in the same way."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + extent(tensor) * tensor.element_size(), name)
        for name, tensor in tensors.items()
        if has_address(tensor) and tensor.numel()
    )
    found = []
    open_until: list[tuple[int, str]] = []  # (end, name) of those that may reach into the next ones
    shown: set[object] = set()
    for begin, end, name in spans:
        # One of several that show the same memory in the same way stands for all: they would be compared pairwise.
        same = (tie(tensors[name]), id(tensors[name]) in moving)
        if same in shown:
            continue
        shown.add(same)
        open_until = [(until, other) for until, other in open_until if until > begin]
        found += [
            (other, name)
            for _, other in open_until
            if (id(tensors[name]) in moving or id(tensors[other]) in moving)
            and tie(tensors[name]) != tie(tensors[other])
        ]
        open_until.append((end, name))
    return found


def shared_in_part(tensors: Mapping[Key, object]) -> list[tuple[str, str]]:
    """Why a part of these tensors cannot be written by itself: writing one would change some of another.

    Returns (sentence, the first of the two names) for each pair.
    """
    plain = {".".join(key): each for key, each in tensors.items() if problem_with(each) is None}
    found = overlapping(plain, {id(each) for each in plain.values()})  # type: ignore[arg-type]
    cure = "and partial=True may give one without the other: give one of them memory of its own"
    return [(f"{a} and {b} share memory in part in the destination, {cure}", a) for a, b in found]


def shown_by_others(keep: Collection[torch.Tensor], places: Sequence[torch.Tensor]) -> bool:
    """Are there more tensors over the slab of these places than those to keep? True if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not places:
        return bool(places)
    slab = places[0].untyped_storage()
    lone = torch.empty(1)
    own = count(lone.untyped_storage()._cdata) - 1  # of the storage object in Python
    shown = {id(tensor) for tensor in keep if tensor.untyped_storage()._cdata == slab._cdata}
    return bool(count(slab._cdata) > len(shown) + own)
