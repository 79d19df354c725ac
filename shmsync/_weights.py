"""Reading weights out of what users hold: a module, a TensorDict, or a mapping of dotted keys.

collect() gives the leaves by key path, and the dicts they were found in. With those the next publish of the same
object only has to see that the dicts still hold the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from .errors import ManifestMismatch
from .manifest import Key, Manifest

Weights = nn.Module | TensorDictBase | Mapping[str, Any]
Patterns = str | Sequence[str] | None
# (dict, [(key, value), ...], whole): a dict in which leaves were found; `whole`: its size counts too.
Guard = tuple[dict[str, Any], list[tuple[str, Any]], bool]


class Collected(NamedTuple):
    """Leaves by key path, in order."""

    tensors: dict[Key, Any]
    guards: list[Guard] | None  # None: the source cannot be recognised again cheaply


class Filter(NamedTuple):
    """Glob patterns on dotted keys: a leaf counts if some `include` matches (or there is none) and no `exclude`."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    @classmethod
    def of(cls, include: Patterns, exclude: Patterns) -> Filter:
        """From what users pass: one pattern, several, or None."""
        return cls(None if include is None else _patterns(include), _patterns(exclude or ()))

    def admits(self, name: str) -> bool:
        """Is the leaf of this dotted key part of the arena?"""
        if self.include is not None and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    @property
    def filters(self) -> bool:
        """Does it leave anything out?"""
        return self.include is not None or bool(self.exclude)


def _patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def collect(source: Weights, filter: Filter, manifest: Manifest | None = None) -> Collected:
    """Every leaf of `source` that the filter admits. With a manifest, dotted keys are resolved in it first."""
    if isinstance(source, nn.Module):
        return _from_module(source, filter)
    if isinstance(source, TensorDictBase):
        pairs: Iterable[tuple[Key, Any]] = (
            ((key,) if isinstance(key, str) else tuple(key), value)
            for key, value in source.items(include_nested=True, leaves_only=True, is_leaf=_is_tensor_class)
        )
        return Collected(_admitted(pairs, filter), None)
    if isinstance(source, Mapping):
        return _from_mapping(source, filter, manifest)
    raise TypeError(
        f"weights must be a torch.nn.Module, a TensorDict or a mapping of dotted keys to tensors, "
        f"not {type(source).__name__}"
    )


def _is_tensor_class(cls: type) -> bool:
    return not issubclass(cls, TensorDictBase)


def _admitted(pairs: Iterable[tuple[Key, Any]], filter: Filter) -> dict[Key, Any]:
    return {key: value for key, value in pairs if filter.admits(".".join(key))}


def _from_module(module: nn.Module, filter: Filter) -> Collected:
    if isinstance(module, torch.jit.ScriptModule):  # keeps its tensors in C++, where no dict can be watched
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return Collected(_admitted(((tuple(name.split(".")), tensor) for name, tensor in named), filter), None)
    pairs: list[tuple[Key, Any]] = []
    guards: list[Guard] = []
    seen: set[int] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        path = tuple(prefix.split(".")) if prefix else ()
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                pairs.append(((*path, name), tensor))
        if id(child) in seen:
            continue
        seen.add(id(child))
        stores = [(name, child.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")]
        guards.append((child.__dict__, stores, False))
        guards += [(store, list(store.items()), True) for _, store in stores]
    return Collected(_admitted(pairs, filter), guards)


def not_saved(module: nn.Module) -> set[Key]:
    """Buffers that no state_dict() has; an arena made from one lacks them, and they stay the module's own."""
    return {
        (*(prefix.split(".") if prefix else ()), name)
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }


def _from_mapping(source: Mapping[str, Any], filter: Filter, manifest: Manifest | None) -> Collected:
    guards: list[Guard] | None = []

    def walk(mapping: Mapping[str, Any], path: Key) -> Iterable[tuple[Key, Any]]:
        nonlocal guards
        if type(mapping) is dict and guards is not None:
            guards.append((mapping, list(mapping.items()), True))
        else:
            guards = None
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise TypeError(f"keys must be dotted strings, not {key!r}; flatten the mapping first")
            if isinstance(value, Mapping):
                yield from walk(value, (*path, key))
            else:
                yield _resolve((*path, key), manifest), value

    return Collected(_admitted(walk(source, ()), filter), guards)


def _resolve(path: Key, manifest: Manifest | None) -> Key:
    """The leaf that is meant: a dotted key is a path."""
    if manifest is not None:
        leaf = manifest.by_key.get(path) or manifest.by_name.get(".".join(path))
        if leaf is not None:
            return leaf.key
    return tuple(".".join(path).split("."))


def check_keys(tensors: Mapping[Key, Any]) -> None:
    """Refuse leaves that cannot stand in one tree, or be told apart by their dotted key."""
    names: dict[str, Key] = {}
    inner: set[Key] = set()
    for key in tensors:
        name = ".".join(key)
        if name in names:
            raise ManifestMismatch(f"{names[name]} and {key} have the same dotted key {name!r}; rename one of them")
        names[name] = key
        inner.update(key[:end] for end in range(1, len(key)))
    for key in tensors:
        if key in inner:
            raise ManifestMismatch(f"{'.'.join(key)!r} is both a tensor and the parent of other keys; rename it")


def problem_with(value: Any) -> str | None:
    """Why this object cannot be a leaf at all, or None."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, not a tensor; leave it out with exclude="
    if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "is not initialised yet; run the lazy module once before publishing it"
    if value.layout is not torch.strided:
        return f"is {value.layout}, but only dense tensors can be shared; call .to_dense()"
    if value.is_quantized:
        return "is quantised, but only plain dtypes can be shared; publish its integer representation"
    if value.device.type == "meta":
        return "is on the meta device and has no values; materialise the module first"
    return None
