"""The front door of weights: a module, a TensorDict, or a nested mapping of these, of tensors, arrays and numbers.

collect() gives their leaves by key path. The keys of a module are the names of its parameters and buffers, without the
wrappers (wrappers.py).
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...errors import ManifestMismatch
from ...memory.arrays import as_tensor
from ...memory.manifest import Key, Manifest, tie
from .dtypes import Dtypes, cast_leaves
from .leaf_check import check_depth, is_tensordict, problem_with, problem_with_key, shown
from .wrappers import of_wrappers, respelled, walk, without

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Weights: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, Any]"
Patterns = str | Sequence[str] | None


class Filter(NamedTuple):
    """Glob patterns on dotted keys: a leaf counts if some `include` matches (or there is none) and no `exclude`."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    @classmethod
    def of(cls, include: Patterns, exclude: Patterns) -> Filter | None:
        """From what users pass: one pattern, several, or None. None where every leaf counts."""
        if include is None and not exclude:
            return None
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
            if not any(map(re.compile(translate(pattern)).match, known))
        ]


@functools.lru_cache(maxsize=256)
def _any_of(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """Does some pattern match? As one expression: many patterns cost little more than one."""
    return re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns) or "(?!)").match


def _patterns(patterns: str | Sequence[str], argument: str) -> tuple[str, ...]:
    if isinstance(patterns, str):
        return (patterns,)
    listed = tuple(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, (bytes, Mapping)) else None
    if listed is None or not all(isinstance(each, str) for each in listed):
        raise TypeError(f"{argument}= is a glob pattern or a list of them, not {patterns!r}")
    return listed


def collect(
    source: Weights, manifest: Manifest | None = None, filter: Filter | None = None, *, to_write: bool = False
) -> dict[Key, Any]:
    """Every leaf of `source` that the filter admits, by key path.

    Each is the object that the source holds. Arrays and numbers become tensors, unless `to_write` says that the leaves
    are targets.

    Args:
        manifest: of an arena, whose spelling of a key counts: with other dots, or with other wrappers.

    Raises TypeError for other sources, and ManifestMismatch for a tree that is too deep, for two keys that are one
    leaf, and for FSDP's FullyShardedDataParallel.
    """
    is_module, is_tree = isinstance(source, nn.Module), is_tensordict(source)
    if not (is_module or is_tree or isinstance(source, Mapping)):
        raise TypeError(
            "weights must be a torch.nn.Module, a TensorDict, or a nested mapping of dotted keys to modules, tensors, "
            f"numpy arrays and numbers, not {type(source).__name__}"
        )
    names = {} if manifest is None else manifest.by_name
    found: dict[Key, Any] = {}
    for path, value in _leaves(source, ()):
        name = ".".join(path)
        key = names[name].key if name in names else path if is_module or is_tree else tuple(name.split("."))
        if key in found:
            raise ManifestMismatch(f"the weights give {name!r} twice, under two spellings; leave one out")
        found[key] = value
    known = {} if manifest is None else manifest.by_key
    if not is_module:
        found = without(found, of_wrappers(found) - known.keys())
    return {
        key: value if to_write else as_tensor(value)
        for key, value in respelled(found, known).items()
        if filter is None or filter.admits(".".join(key))
    }


def _leaves(source: Any, path: Key) -> Iterator[tuple[Key, Any]]:
    check_depth(path)
    if isinstance(source, nn.Module):
        left_out = not_saved(source) if path else set()  # a module in a mapping gives what its state_dict() has
        for key, tensor in _of_module(source):
            if key not in left_out:
                yield (*path, *key), tensor
        return
    if is_tensordict(source):
        from tensordict import TensorDict

        from ...memory.dotted import DottedTensorDict

        # The dict inside it: items() takes 5 µs a leaf, here they are at hand.
        store = getattr(source, "_tensordict", None) if type(source) in (TensorDict, DottedTensorDict) else None
        items = store.items() if type(store) is dict else source.items()
    else:
        items = source.items()
    for key, value in items:
        if not isinstance(key, str):
            raise TypeError(f"keys must be dotted strings, not {key!r}; flatten the mapping first")
        below = None if isinstance(value, torch.Tensor) else _below(value)
        if below is None:
            yield (*path, key), value
        else:
            yield from _leaves(below, (*path, key))


def _below(value: Any) -> Any:
    """What has leaves below it: the value, or the TensorDict in a tensorclass. None for a leaf."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_tensor_collection(value):
        if tensordict.is_non_tensor(value):
            return None
        return value if is_tensordict(value) else value._tensordict
    return value if isinstance(value, (nn.Module, Mapping)) else None


def _of_module(module: nn.Module) -> Iterator[tuple[Key, torch.Tensor]]:
    for path, child in walk(module):
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                yield ((*path, *name.split(".")) if "." in name else (*path, name)), tensor  # TensorDictParams has dots


def not_saved(module: nn.Module) -> set[Key]:
    """Non-persistent buffers. An arena made from a state_dict() lacks them, so they stay the module's own."""
    return {(*place.path, name) for place in walk(module) for name in place.module._non_persistent_buffers_set}


def check_keys(tensors: Mapping[Key, Any]) -> None:
    """Raise ManifestMismatch for keys that no leaf can have, that form no tree, or that have the same dotted form."""
    problems = [f"the key {shown(key)} {reason}" for key in tensors if (reason := problem_with_key(key))]
    inner = {key[:end] for key in tensors for end in range(1, len(key))} if not problems else set()
    names: dict[str, Key] = {}
    for key in tensors:
        name = ".".join(key)
        if (other := names.setdefault(name, key)) is not key:
            problems.append(f"{other} and {key} have the same dotted key {name!r}; rename one of them")
        if key in inner:
            problems.append(f"{name!r} is both a tensor and the parent of other keys; rename it")
    if problems:
        raise ManifestMismatch("these weights cannot be published: " + "; ".join(problems))


def manifest_of(weights: Weights, filter: Filter | None, dtype: Dtypes) -> Manifest:
    """The manifest of a new arena for these weights. Raises ManifestMismatch."""
    tensors = collect(weights)
    problems = []
    if filter is not None:
        problems = filter.idle(".".join(key) for key in tensors)
        tensors = {key: value for key, value in tensors.items() if filter.admits(".".join(key))}
    check_keys(tensors)
    problems += [f"{'.'.join(key)} {reason}" for key, value in tensors.items() if (reason := problem_with(value))]
    if not tensors and not problems:
        problems = ["there is no tensor to publish (after include= and exclude=)"]
    if problems:
        raise ManifestMismatch("these weights cannot be published: " + "; ".join(problems))
    dtypes = cast_leaves(weights, tensors, dtype)
    unsaved = not_saved(weights) if isinstance(weights, nn.Module) else ()
    if type(weights) is dict:  # a state_dict() is an OrderedDict, and its ties are meant
        _warn_of_ties(weights)
    return Manifest.of(tensors, dtypes=dtypes, filtered=filter is not None, unsaved=unsaved)


def _warn_of_ties(weights: Mapping[str, Any]) -> None:
    """Warn once if a mapping has one tensor under two names: they stay one, which may be a mistake."""
    first: dict[object, str] = {}
    for name, value in weights.items():
        place = tie(value) if isinstance(value, torch.Tensor) else None
        if place is not None and (other := first.setdefault(place, name)) is not name:
            warnings.warn(
                f"{other!r} and {name!r} are one tensor, and stay one: what is published for one of them is the "
                "other's too. If that is no tie, pass a clone() of one",
                stacklevel=2,
            )
            return
