"""Tensors that share memory: which of a module's do so in part, and whether others show the slab."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from ...memory.arena import has_address
from ...memory.manifest import Key, tie
from .leaf_check import extent, problem_with

K = TypeVar("K", bound=Hashable)


def overlapping(tensors: Mapping[str, torch.Tensor], moving: Collection[int]) -> list[tuple[str, str]]:
    """Names of those that share memory with one of the `moving` (ids), but do not show all of it in the same way."""
    # One of several that show the same memory in the same way stands for all: they would be compared pairwise.
    shown: dict[object, str] = {}
    held = [name for name, tensor in tensors.items() if has_address(tensor) and tensor.numel()]
    for name in sorted(held, key=lambda name: (_bytes_spanned(tensors[name]), name)):
        shown.setdefault((tie(tensors[name]), id(tensors[name]) in moving), name)
    return [
        (one, two)
        for one, two in meeting({name: tensors[name] for name in shown.values()})
        if (id(tensors[one]) in moving or id(tensors[two]) in moving) and tie(tensors[one]) != tie(tensors[two])
    ]


def meeting(tensors: Mapping[K, torch.Tensor]) -> Iterator[tuple[K, K]]:
    """Pairs of tensors whose ranges of memory meet, in the order of where they begin."""
    reaching: list[tuple[int, K]] = []  # (end, key) of those that reach beyond where the next one begins
    for key in sorted(tensors, key=lambda key: (str(tensors[key].device), tensors[key].data_ptr())):
        begin, device = tensors[key].data_ptr(), tensors[key].device
        reaching = [each for each in reaching if each[0] > begin and tensors[each[1]].device == device]
        yield from ((other, key) for _, other in reaching)
        reaching.append((begin + _bytes_spanned(tensors[key]), key))


def _bytes_spanned(tensor: torch.Tensor) -> int:
    return extent(tensor) * tensor.element_size()


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
