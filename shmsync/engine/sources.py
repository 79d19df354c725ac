"""Reading weights out of what users hold: a module, a TensorDict, or a mapping of dotted keys.

collect() gives the leaves by key path, and the dicts they were found in. With those the next publish of the same
object only has to see that the dicts still hold the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from ..errors import ManifestMismatch
from ..memory.manifest import Key, Manifest

Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Any]
Patterns = str | Sequence[str] | None
# (dict, [(key, value), ...], whole): a dict in which leaves were found; `whole`: its size counts too.
Guard = tuple[dict[str, Any], list[tuple[str, Any]], bool]


class Collected(NamedTuple):
    """Leaves by key path, in order."""

    tensors: dict[Key, Any]
    guards: list[Guard] | None  # None: a change of the source cannot be noticed cheaply


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


EVERYTHING = Filter(None, ())


def _patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def collect(source: Weights, filter: Filter, manifest: Manifest | None = None) -> Collected:
    """Every leaf of `source` that the filter admits. With a manifest, dotted keys are resolved in it first."""
    if isinstance(source, nn.Module):
        return _from_module(source, filter)
    if isinstance(source, TensorDictBase):
        return _from_tensordict(source, filter)
    if isinstance(source, Mapping):
        return _from_mapping(source, filter, manifest)
    raise TypeError(
        f"weights must be a torch.nn.Module, a TensorDict or a mapping of dotted keys to tensors, "
        f"not {type(source).__name__}"
    )


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
    """Non-persistent buffers. An arena made from a state_dict() lacks them, so they stay the module's own."""
    return {
        (*(prefix.split(".") if prefix else ()), name)
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }


class _Watch:
    """The dicts in which leaves are found; `guards` is None when one of them cannot be watched."""

    def __init__(self) -> None:
        self.guards: list[Guard] | None = []

    def add(self, store: object) -> None:
        if type(store) is dict and self.guards is not None:
            self.guards.append((store, list(store.items()), True))
        else:
            self.guards = None


def _from_tensordict(source: TensorDictBase, filter: Filter) -> Collected:
    watch = _Watch()
    tensors = _admitted(_in_tensordict(source, (), watch), filter)
    return Collected(tensors, watch.guards)


def _in_tensordict(source: TensorDictBase, path: Key, watch: _Watch) -> Iterable[tuple[Key, Any]]:
    # The dict inside it: items() takes 5 µs a leaf, and this dict can be watched.
    store = getattr(source, "_tensordict", None) if type(source) is TensorDict else None
    watch.add(store)
    if watch.guards is not None:  # select(inplace=True) and others give the TensorDict another dict
        watch.guards.append((vars(source), [("_tensordict", store)], False))
    for key, value in source.items() if type(store) is not dict else store.items():
        if isinstance(value, TensorDictBase):
            yield from _in_tensordict(value, (*path, key), watch)
        else:
            yield (*path, key), value


def _from_mapping(source: Mapping[str, Any], filter: Filter, manifest: Manifest | None) -> Collected:
    watch = _Watch()
    tensors = _admitted(_in_mapping(source, (), watch, manifest), filter)
    return Collected(tensors, watch.guards)


def _in_mapping(
    source: Mapping[str, Any], path: Key, watch: _Watch, manifest: Manifest | None
) -> Iterable[tuple[Key, Any]]:
    watch.add(source)
    for key, value in source.items():
        if not isinstance(key, str):
            raise TypeError(f"keys must be dotted strings, not {key!r}; flatten the mapping first")
        if isinstance(value, Mapping):
            yield from _in_mapping(value, (*path, key), watch, manifest)
        else:
            yield _resolve((*path, key), manifest), value


def _resolve(path: Key, manifest: Manifest | None) -> Key:
    """The key path that dotted keys stand for; the manifest knows keys that contain dots."""
    if manifest is not None:
        leaf = manifest.by_key.get(path) or manifest.by_name.get(".".join(path))
        if leaf is not None:
            return leaf.key
    return tuple(".".join(path).split("."))


def check_keys(tensors: Mapping[Key, Any]) -> None:
    """Raise ManifestMismatch for keys that do not form a tree, or that have the same dotted form."""
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
