"""What may be written in place: tensors of the user's own that weights are copied into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..engine.source.leaf_check import problem_with
from ..engine.source.manifest_check import overlapping
from ..memory.manifest import Key


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


def shared_in_part(tensors: Mapping[Key, Any]) -> list[str]:
    """Why a part of these tensors cannot be written alone: writing one would change some of another."""
    plain = {".".join(key): each for key, each in tensors.items() if problem_with(each) is None}
    cure = "and partial=True may give one without the other: give one of them private memory"
    found = overlapping(plain, {id(each) for each in plain.values()})
    return [f"{a} and {b} share memory in part in the destination, {cure}" for a, b in found]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reached = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride == 0:
            return True
        if stride <= reached:  # this step does not lead beyond what the smaller ones reach: look closely
            return _meet(tensor)
        reached += stride * (size - 1)
    return False


def _meet(tensor: torch.Tensor) -> bool:
    """Are two elements of this tensor in one place?"""
    at = torch.zeros(1, dtype=torch.int64, device="cpu")
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + torch.arange(n, dtype=torch.int64, device="cpu") * stride).flatten()
    return torch.unique(at).numel() < at.numel()
