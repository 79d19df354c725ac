"""dtype=: which leaves are cast when they are published, and to what."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
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


def kept_leaves(source: Any, tensors: Mapping[Key, Any]) -> set[Key]:
    """The leaves of a source that one dtype for all leaves alone: those that are no parameters.

    Where nothing says which are parameters, as in a state_dict(), that is none but the instances of nn.Buffer. A buffer
    that is one tensor with a parameter is cast with it.
    """
    others = {key for key, each in tensors.items() if not isinstance(each, nn.Parameter)}
    if len(others) == len(tensors) and not isinstance(source, nn.Module):
        others = {key for key in others if isinstance(tensors[key], nn.Buffer)}
    if not others:
        return others
    cast = {tie(each) for key, each in tensors.items() if key not in others and isinstance(each, torch.Tensor)} - {None}
    return {
        key for key in others if not (cast and isinstance(tensors[key], torch.Tensor) and tie(tensors[key]) in cast)
    }


def cast_leaves(
    tensors: Mapping[Key, torch.Tensor], dtype: Dtypes, kept: Container[Key] = ()
) -> dict[Key, torch.dtype]:
    """The leaves that are cast, with their dtypes: floating ones. Of several patterns the first that matches counts.

    `kept`: those that one dtype for all leaves alone.

    Raises ManifestMismatch for a pattern that casts nothing, and for one tensor that would get two dtypes.
    """
    floating = [key for key, tensor in tensors.items() if tensor.dtype.is_floating_point]
    if dtype is None or isinstance(dtype, torch.dtype):
        return {} if dtype is None else {key: dtype for key in floating if key not in kept}
    patterns = matching_patterns(tensors, dtype)
    used = set(patterns.values())
    cast = {key: dtype[pattern] for key, pattern in patterns.items()}
    problems = [_idle(pattern, tensors, floating) for pattern in dtype if pattern not in used]
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


def _idle(pattern: str, tensors: Mapping[Key, torch.Tensor], floating: list[Key]) -> str:
    names = [".".join(key) for key in tensors if fnmatchcase(".".join(key), pattern)]
    if not names:
        return f"the pattern {pattern!r} of dtype= matches no leaf"
    if not any(".".join(key) in names for key in floating):
        return f"the pattern {pattern!r} of dtype= matches only leaves that are not floating, such as {names[0]}"
    return f"the pattern {pattern!r} of dtype= comes too late: patterns before it match {names[0]} too; put it first"
