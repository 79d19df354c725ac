"""What may be written in place: tensors of the user's own that a snapshot or weights are copied into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...memory.manifest import Key, tie
from .leaf_check import problem_with
from .overlaps import meeting, span


def problem_with_target(target: Any) -> str | None:
    """Why a tensor cannot be written in place, or None."""
    if problem := problem_with(target):
        return problem
    if not target.is_contiguous() and _overlaps_itself(target):
        return "has several elements in one place in memory, as expand() makes them; pass its clone()"
    return None


def made_anew(target: object, again: object) -> str | None:
    """Why two looks at one leaf show that it cannot be written, or None."""
    if target is again or not (isinstance(target, torch.Tensor) and isinstance(again, torch.Tensor)):
        return None
    if problem_with(target) or problem_with(again) or target.data_ptr() == again.data_ptr():
        return None
    return "is made again at each access, as in a LazyStackedTensorDict, so a write is lost; pass a contiguous() one"


def collisions(targets: Mapping[Key, torch.Tensor], places: Mapping[Key, int]) -> list[str]:
    """Pairs of targets that share memory though their values come from different places, one sentence each."""
    devices: dict[torch.device, list[tuple[int, int, Key]]] = {}
    for key, target in targets.items():
        if target.numel():
            devices.setdefault(target.device, []).append((*span(target), key))
    return [
        f"{'.'.join(one)} and {'.'.join(two)} share memory, but have values of their own"
        for _, spans in sorted(devices.items(), key=lambda each: str(each[0]))
        for one, two in meeting(sorted(spans, key=lambda each: each[0]))
        if (places[one] != places[two] or tie(targets[one]) != tie(targets[two])) and _meet(targets[one], targets[two])
    ]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reached = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride == 0:
            return True
        if stride <= reached:  # this step does not lead beyond what the smaller ones reach: look closely
            return _meet(tensor)
        reached += stride * (size - 1)
    return False


def _meet(*tensors: torch.Tensor) -> bool:
    """Do two elements of these tensors, whose ranges of memory meet, have a byte in common?"""
    if len(tensors) > 1 and all(tensor.is_contiguous() for tensor in tensors):
        return True
    base = min(tensor.data_ptr() for tensor in tensors)
    places = []
    for tensor in tensors:
        size = tensor.element_size()
        at = torch.tensor([tensor.data_ptr() - base], dtype=torch.int64, device="cpu")
        steps = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        for n, stride in (*steps, (size, 1)):
            along = torch.arange(n, dtype=torch.int64, device="cpu") * stride
            at = (at[:, None] + along).flatten()
        places.append(at)
    together = torch.cat(places)
    return torch.unique(together).numel() < together.numel()
