"""Reading weights out of what users hold: a module, a TensorDict, or a mapping of dotted keys.

collect() gives the leaves by key path, and the dicts they were found in. With those the next publish of the same
object only has to see that the dicts still hold the same objects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...errors import ManifestMismatch
from ...memory.arrays import is_array, tensor_over
from ...memory.manifest import Key, Manifest
from .leaf_check import check_depth, is_tensordict, loaded_class, problem_with_key, shown
from .wrappers import spelled_in, walk, wrapped_by

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Weights: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, Any]"
Patterns = str | Sequence[str] | None
# (dict, [(key, value), ...], whole): a dict in which leaves were found; the next publish compares it with these items.
# `whole`: its size counts too.
WatchedDict = tuple[dict[str, Any], list[tuple[str, Any]], bool]


class Collected(NamedTuple):
    """Leaves by key path, in order."""

    tensors: dict[Key, Any]
    watched_dicts: list[WatchedDict] | None  # None: a change of the source cannot be noticed cheaply


class Filter(NamedTuple):
    """Glob patterns on dotted keys: a leaf counts if some `include` matches (or there is none) and no `exclude`."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    @classmethod
    def of(cls, include: Patterns, exclude: Patterns) -> Filter:
        """From what users pass: one pattern, several, or None."""
        return cls(None if include is None else _patterns(include, "include"), _patterns(exclude or (), "exclude"))

    def admits(self, name: str) -> bool:
        """Is the leaf of this dotted key part of the arena?"""
        if self.include is not None and not _any_of(self.include)(name):
            return False
        return not (self.exclude and _any_of(self.exclude)(name))

    def idle(self, names: Iterable[str]) -> list[str]:
        """A sentence for each pattern that matches none of these dotted keys."""
        known = list(names)
        return [
            f"the pattern {pattern!r} of {argument}= matches no leaf"
            for argument, patterns in (("include", self.include or ()), ("exclude", self.exclude))
            for pattern in patterns
            if not any(map(re.compile(translate(pattern)).match, known))  # not kept: it would push out _any_of()'s
        ]

    @property
    def filters(self) -> bool:
        """Does it leave anything out?"""
        return self.include is not None or bool(self.exclude)


EVERYTHING = Filter(None, ())


@functools.lru_cache(maxsize=256)
def _any_of(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """Does some pattern match? As one expression: many patterns cost little more than one."""
    if not patterns:
        return lambda name: None
    return re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns)).match


def _patterns(patterns: str | Sequence[str], argument: str) -> tuple[str, ...]:
    if isinstance(patterns, str):
        return (patterns,)
    if not isinstance(patterns, Iterable) or isinstance(patterns, (bytes, Mapping)):
        raise TypeError(f"{argument}= is a glob pattern or a list of them, not {patterns!r}")
    listed = tuple(patterns)
    if not all(isinstance(each, str) for each in listed):
        raise TypeError(f"{argument}= is a glob pattern or a list of them, but it has {listed!r}")
    return listed


def collect(
    source: Weights, filter: Filter, manifest: Manifest | None = None, *, to_write: bool = False, watch: bool = True
) -> Collected:
    """Every leaf of `source` that the filter admits. With a manifest, dotted keys are resolved in it first.

    `to_write`: the leaves are targets, so each is the very object that the source holds. `watch`: are the dicts of a
    module needed, in which they were found?
    """
    if isinstance(source, nn.Module):
        return _from_module(source, filter, watch)
    watched = _Watch()
    if is_tensordict(source):
        pairs = _in_tensordict(source, (), watched, manifest)
    elif isinstance(source, Mapping):
        pairs = _in_mapping(source, (), watched, manifest)
    else:
        inner, cure = wrapped_by(source), ""
        if inner is not None:
            cure = f"; pass the {type(inner).__name__} inside it (.func, .__wrapped__ or .__self__)"
        raise TypeError(
            f"weights must be a torch.nn.Module, a TensorDict or a mapping of dotted keys to tensors or numpy arrays, "
            f"not {type(source).__name__}{cure}"
        )
    tensors = _admitted(pairs, filter)
    return Collected(tensors if to_write else _as_tensors(tensors), watched.dicts)


def _admitted(pairs: Iterable[tuple[Key, Any]], filter: Filter) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    filters = filter.filters
    for key, value in pairs:
        if not filters or filter.admits(".".join(key)):
            if key in found:
                raise ManifestMismatch(f"the weights give {'.'.join(key)!r} twice, under two spellings; leave one out")
            found[key] = value
    return found


def _as_tensors(values: dict[Key, Any]) -> dict[Key, Any]:
    """Tensors over arrays, and the values that a collective still brings, which are waited for."""
    pending = loaded_class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    for key, value in values.items():
        if pending is not None and type(value) is pending:
            values[key] = value.wait()
        elif is_array(value):
            values[key] = tensor_over(value)
    return values


def _from_module(module: nn.Module, filter: Filter, watch: bool) -> Collected:
    pairs: list[tuple[Key, Any]] = []
    watched: list[WatchedDict] | None = [] if watch else None
    seen: set[int] = set()
    scripted: list[Key] = []
    for path, _, child, around in walk(module):
        if scripted and any(path[: len(each)] == each for each in scripted):
            continue
        if isinstance(child, torch.jit.ScriptModule):  # keeps its tensors in C++, where no dict can be watched
            named = (*child.named_parameters(remove_duplicate=False), *child.named_buffers(remove_duplicate=False))
            pairs += [((*path, *name.split(".")), tensor) for name, tensor in named]
            watched = None
            scripted.append(path)
            continue
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                pairs.append(((*path, *name.split(".")) if "." in name else (*path, name), tensor))  # TensorDictParams
        if watched is None:
            continue
        for each in (*around, child):
            if id(each) not in seen:
                seen.add(id(each))
                held = each.__dict__
                stores = [(name, held[name]) for name in ("_parameters", "_buffers", "_modules")]
                watched.append((held, stores, False))
                watched += [(store, list(store.items()), True) for _, store in stores]
    return Collected(_admitted(pairs, filter), watched)


def not_saved(module: nn.Module) -> set[Key]:
    """Non-persistent buffers. An arena made from a state_dict() lacks them, so they stay the module's own."""
    return {
        (*place.path, name)
        for place in walk(module)
        if not isinstance(place.module, torch.jit.ScriptModule)
        for name in place.module._non_persistent_buffers_set
    }


class _Watch:
    """The dicts in which leaves are found; `dicts` is None when one of them cannot be watched."""

    def __init__(self) -> None:
        self.dicts: list[WatchedDict] | None = []

    def add(self, store: object) -> None:
        if type(store) is dict and self.dicts is not None:
            self.dicts.append((store, list(store.items()), True))
        else:
            self.dicts = None


def _in_tensordict(
    source: TensorDictBase, path: Key, watch: _Watch, manifest: Manifest | None
) -> Iterable[tuple[Key, Any]]:
    from tensordict import TensorDict, is_non_tensor, is_tensor_collection

    from ...memory.dotted import DottedTensorDict

    # The dict inside it: items() takes 5 µs a leaf, and this dict can be watched.
    check_depth(path)
    store = getattr(source, "_tensordict", None) if type(source) in (TensorDict, DottedTensorDict) else None
    watch.add(store)
    if watch.dicts is not None:  # select(inplace=True) and others give the TensorDict another dict
        watch.dicts.append((vars(source), [("_tensordict", store)], False))
    for key, value in source.items() if type(store) is not dict else store.items():
        if not isinstance(value, torch.Tensor) and is_tensor_collection(value) and not is_non_tensor(value):
            # A tensorclass keeps a TensorDict; what else it keeps is in there too, as NonTensorData.
            below = value if is_tensordict(value) else value._tensordict
            yield from _in_tensordict(below, (*path, key), watch, manifest)
        else:
            yield key_of((*path, key), manifest, flat=False), value


def _in_mapping(
    source: Mapping[str, Any], path: Key, watch: _Watch, manifest: Manifest | None
) -> Iterable[tuple[Key, Any]]:
    check_depth(path)
    watch.add(source)
    for key, value in source.items():
        if not isinstance(key, str):
            raise TypeError(f"keys must be dotted strings, not {key!r}; flatten the mapping first")
        if isinstance(value, Mapping):
            yield from _in_mapping(value, (*path, key), watch, manifest)
        else:
            yield key_of((*path, key), manifest, flat=True), value


def key_of(path: Key, manifest: Manifest | None, *, flat: bool) -> Key:
    """The key path that a path in a source stands for. `flat`: its keys may be dotted.

    With a manifest this is the arena's own spelling: with other dots, or without the prefixes of a wrapper.
    """
    if manifest is not None:
        if path in manifest.by_key:
            return path
        name = ".".join(path)
        leaf = manifest.by_name.get(name)
        known = spelled_in(manifest.by_key, tuple(name.split("."))) if leaf is None else leaf.key
        if known:
            return known
    return tuple(".".join(path).split(".")) if flat else path


def check_keys(tensors: Mapping[Key, Any]) -> None:
    """Raise ManifestMismatch for keys that no leaf can have, that form no tree, or that have the same dotted form."""
    odd = [f"the key {shown(key)} {reason}" for key in tensors if (reason := problem_with_key(key))]
    if odd:
        raise ManifestMismatch("these weights cannot be published: " + "; ".join(odd))
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
