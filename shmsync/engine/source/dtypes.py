"""dtype=: which leaves are cast when they are published, and to what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from ...errors import ManifestMismatch
from ...memory.manifest import Key, tie

Dtypes: TypeAlias = torch.dtype | Mapping[str, torch.dtype] | None

_WANTED = 'a floating dtype such as torch.bfloat16, or glob patterns to such dtypes: {"*.weight": torch.bfloat16}'


def check_dtypes(dtype: Any) -> None:
    """Raise TypeError or ValueError for what dtype= cannot be."""
    if dtype is None or isinstance(dtype, torch.dtype):
        chosen = [] if dtype is None else [dtype]
    elif isinstance(dtype, Mapping):
        for pattern, each in dtype.items():
            if not isinstance(pattern, str) or not isinstance(each, torch.dtype):
                raise TypeError(f"dtype= is {_WANTED}, but it has {pattern!r}: {each!r}")
        chosen = list(dtype.values())
    else:
        raise TypeError(f"dtype= is {_WANTED}, not {dtype!r} of type {type(dtype).__name__}")
    for each in chosen:
        if not each.is_floating_point:
            raise ValueError(f"dtype= casts floating leaves and must be floating itself, not {each}")


def cast_leaves(source: Any, tensors: Mapping[Key, Any], dtype: Dtypes) -> dict[Key, torch.dtype]:
    """The leaves of a source that are cast, with their dtypes: floating ones. The first pattern that matches counts.

    One dtype for all leaves the leaves alone that are no parameters. Where nothing says which are parameters, as in a
    state_dict(), that is none but the instances of nn.Buffer.

    Raises ManifestMismatch for a pattern that casts nothing, and for one tensor that would get two dtypes.
    """
    if dtype is None:
        return {}
    floating = [key for key, each in tensors.items() if each.dtype.is_floating_point]
    problems = []
    if isinstance(dtype, torch.dtype):
        chosen = [key for key in floating if isinstance(tensors[key], nn.Parameter)]
        if not chosen and not isinstance(source, nn.Module):
            chosen = [key for key in floating if not isinstance(tensors[key], nn.Buffer)]
        cast = dict.fromkeys(chosen, dtype)
    else:
        patterns = matching_patterns(tensors, dtype)
        used = set(patterns.values())
        cast = {key: dtype[pattern] for key, pattern in patterns.items()}
        problems = [
            f"the pattern {pattern!r} of dtype= casts nothing: it matches no floating leaf, or those before it match "
            "its leaves too; put it first"
            for pattern in dtype
            if pattern not in used
        ]
    first: dict[object, Key] = {}
    for key in floating:
        identity = tie(tensors[key])
        other = key if identity is None else first.setdefault(identity, key)
        one, two = (cast.get(each, tensors[each].dtype) for each in (other, key))
        if one != two:
            problems.append(
                f"{'.'.join(other)} and {'.'.join(key)} are one tensor, but dtype= makes them {one} and {two}; give "
                "both the same"
            )
    if problems:
        raise ManifestMismatch("; ".join(problems) + ". Nothing was created")
    return cast


def matching_patterns(tensors: Mapping[Key, Any], patterns: Iterable[str]) -> dict[Key, str]:
    """The first of these patterns that matches, for each floating leaf that one matches."""
    floating = [key for key, each in tensors.items() if isinstance(each, torch.Tensor) and each.dtype.is_floating_point]
    found = {key: next((each for each in patterns if fnmatchcase(".".join(key), each)), None) for key in floating}
    return {key: pattern for key, pattern in found.items() if pattern is not None}
