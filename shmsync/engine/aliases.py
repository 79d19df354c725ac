"""Tensors that share memory: which of a module's do so in part, and who else shows a place of the slab."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ..memory.manifest import tie


def extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.dtype.itemsize


def overlapping(tensors: Mapping[str, torch.Tensor], moving: Collection[int]) -> list[tuple[str, str]]:
    """Names of those that share memory with one of the `moving` (ids), but do not show all of it in the same way."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + extent(tensor), name)
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu" and tensor.numel()
    )
    found = []
    open_until: list[tuple[int, str]] = []  # (end, name) of those that may reach into the next ones
    for begin, end, name in spans:
        open_until = [(until, other) for until, other in open_until if until > begin]
        found += [
            (other, name)
            for _, other in open_until
            if (id(tensors[name]) in moving or id(tensors[other]) in moving)
            and tie(tensors[name]) != tie(tensors[other])
        ]
        open_until.append((end, name))
    return found


def make_private(known: Sequence[torch.Tensor], places: Sequence[torch.Tensor], keep: Collection[int]) -> None:
    """Give every tensor that shows one of these places of a slab memory of its own, but those to keep (ids).

    Tensors of the user's are found among the objects of Python, 0.1 s for a million of them: this is for a rare event.
    """
    ranges = [(place.data_ptr(), place.data_ptr() + place.nbytes) for place in places if place.nbytes]
    for tensor in (*known, *_all_tensors()):
        if id(tensor) not in keep and _address_in(tensor, ranges):
            tensor.data = tensor.data.clone()


def _all_tensors() -> Iterator[torch.Tensor]:
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # isinstance() would ask proxies for their class
            yield each


def _address_in(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> bool:
    try:
        address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.layout is torch.strided else 0
    except RuntimeError:  # a wrapper without memory
        return False
    return any(begin <= address < end for begin, end in ranges)
