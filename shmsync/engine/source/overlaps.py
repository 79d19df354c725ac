"""Tensors that share memory: which of a module's do so in part, and whether others show the slab."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from ...memory.devices import has_address
from ...memory.manifest import Key, tie
from .leaf_check import extent, problem_with

K = TypeVar("K")


def overlapping(tensors: Mapping[str, torch.Tensor], moving: Collection[int]) -> list[tuple[str, str]]:
    """Names of those that share memory with one of the `moving` (ids), but do not show all of it in the same way."""
    spans = sorted((*span(each), name) for name, each in tensors.items() if has_address(each) and each.numel())
    # One of several that show the same memory in the same way stands for all: they would be compared pairwise.
    shown: dict[object, tuple[int, int, str]] = {}
    for each in spans:
        tensor = tensors[each[2]]
        shown.setdefault((tie(tensor), id(tensor) in moving), each)
    return [
        (one, two)
        for one, two in meeting(shown.values())
        if (id(tensors[one]) in moving or id(tensors[two]) in moving) and tie(tensors[one]) != tie(tensors[two])
    ]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins and ends."""
    begin = tensor.data_ptr()
    return begin, begin + extent(tensor) * tensor.element_size()


def meeting(spans: Iterable[tuple[int, int, K]]) -> Iterator[tuple[K, K]]:
    """The pairs of these, each (begin, end, name), that have addresses in common; sorted by where they begin."""
    reaching: list[tuple[int, K]] = []  # (end, name) of those that reach beyond where the next one begins
    for begin, end, name in spans:
        reaching = [each for each in reaching if each[0] > begin]
        yield from ((other, name) for _, other in reaching)
        reaching.append((end, name))


def shared_in_part(tensors: Mapping[Key, object]) -> list[str]:
    """Why a part of these tensors cannot be written alone: writing one would change some of another."""
    plain = {".".join(key): each for key, each in tensors.items() if problem_with(each) is None}
    found = overlapping(plain, {id(each) for each in plain.values()})  # type: ignore[arg-type]
    cure = "and partial=True may give one without the other: give one of them private memory"
    return [f"{a} and {b} share memory in part in the destination, {cure}" for a, b in found]


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
