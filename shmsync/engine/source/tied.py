"""Second names of tied tensors, which weights may lack: a checkpoint may save a shared tensor once, under one name.

A module whose head.weight is its emb.weight needs the values of emb.weight alone. Where the two are not one tensor, a
missing name is a missing weight, and is refused.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from ...memory.manifest import Key, tie


def second_names(tensors: Mapping[Key, Any], known: Container[Key]) -> dict[Key, Key]:
    """For each of these keys that is not known: a known one under which there is the same tensor."""
    unknown = [key for key in tensors if key not in known]
    if not unknown:
        return {}
    first: dict[Any, Key] = {}
    for key, tensor in tensors.items():
        if key in known:
            first.setdefault(identity(tensor), key)
    return {key: found for key in unknown if (found := first.get(identity(tensors[key]))) is not None}


def without(tensors: Mapping[Key, Any], names: Container[Key]) -> dict[Key, Any]:
    """These tensors but for those of these names."""
    return {key: tensor for key, tensor in tensors.items() if key not in names}


def tied_along(whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What else of `whole` changes with what is given: the leaves that are one tensor with one of those names."""
    new = {identity(each): given[name] for name, each in whole.items() if name in given and torch.is_tensor(each)}
    return {
        name: new[identity(each)]
        for name, each in whole.items()
        if name not in given and torch.is_tensor(each) and identity(each) in new
    }


def identity(tensor: Any) -> Any:
    """Equal for tensors that are one: the same object, or the same memory seen in the same way."""
    return (tie(tensor) if isinstance(tensor, torch.Tensor) else None) or id(tensor)
