"""Strip the prefixes of wrappers (torch.compile(), DataParallel, DDP, AveragedModel) from the keys of a module.

A wrapper puts a module inside another one, and a prefix before each of its keys. Arenas and messages have the keys
of the wrapped module, wherever in the tree the wrapper is: trainer and workers have the same keys, whichever of them is
wrapped. A wrapper is recognised by its type, since a
user's module may have an attribute of any name.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator
from typing import Any, NamedTuple

from torch import nn

from ...errors import ManifestMismatch
from ...memory.manifest import Key
from .leaf_check import check_depth, is_a, loaded_class

# (module, class, attribute that holds the wrapped module)
_TRANSPARENT = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
_FSDP = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_PREFIXES = ("_orig_mod", "module", "_checkpoint_wrapped_module")  # the attributes above, as they occur in keys


class Submodule(NamedTuple):
    """A module in the tree of another one."""

    path: Key  # without the wrappers
    prefix: str  # with them, and the last dot: what torch writes before its keys
    module: nn.Module
    wrappers: tuple[nn.Module, ...]  # around it, the outermost first


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that is meant: what torch.compile(), DataParallel, DDP or AveragedModel wraps, else the module.

    Raises ManifestMismatch for FSDP's FullyShardedDataParallel, whose parameters are pieces of flat ones.
    """
    return _inside(module, "", _wrapper_types())[0]


def _wrapper_types() -> tuple[type, ...]:
    """The classes of wrappers that are loaded by now; a module that is none of them costs one isinstance()."""
    known = (*((home, name) for home, name, _ in _TRANSPARENT), _FSDP)
    return tuple(kind for home, name in known if (kind := loaded_class(home, name)) is not None)


def _inside(module: nn.Module, prefix: str, types: tuple[type, ...]) -> tuple[nn.Module, str, tuple[nn.Module, ...]]:
    if not isinstance(module, types):
        return module, prefix, ()
    around: list[nn.Module] = []
    while (attribute := _attribute(module, prefix)) is not None:
        around.append(module)
        prefix = f"{prefix}{attribute}."
        module = module._modules[attribute]  # type: ignore[assignment]
    return module, prefix, tuple(around)


def _attribute(module: nn.Module, prefix: str) -> str | None:
    for home, name, attribute in _TRANSPARENT:
        if is_a(module, home, name):
            return attribute
    if is_a(module, *_FSDP):
        raise ManifestMismatch(
            f"{prefix.rstrip('.') or 'the module'} is a FullyShardedDataParallel, and its parameters are pieces of "
            "flat ones; nothing was changed. Pass the full weights: torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), which all ranks must call"
        )
    return None


def walk(module: nn.Module) -> Iterator[Submodule]:
    """The module and all in it, each as often as it occurs, in the order of named_modules()."""
    types = _wrapper_types()
    waiting: list[tuple[Key, str, nn.Module]] = [((), "", module)]
    while waiting:  # no recursion: a generator inside a generator would pass each module up through all levels
        path, prefix, each = waiting.pop()
        check_depth(path)
        each, prefix, around = _inside(each, prefix, types)
        yield Submodule(path, prefix, each, around)
        waiting += [
            ((*path, name), f"{prefix}{name}.", child)
            for name, child in reversed(each._modules.items())
            if child is not None
        ]


def modules_in(module: nn.Module) -> list[nn.Module]:
    """The module and all in it, wrappers too, each once; what modules() gives, at a third of its time."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting.extend(reversed(each._modules.values()))
    return list(found.values())


def submodules(module: nn.Module) -> dict[Key, nn.Module]:
    """The module and all in it by path, without the wrappers."""
    return {place.path: place.module for place in walk(module)}


def state_of(module: nn.Module) -> dict[str, Any]:
    """The module's state_dict(), under the keys that it has without wrappers."""
    module = unwrapped(module)
    renamed = {place.prefix: ".".join((*place.path, "")) for place in walk(module) if place.wrappers}
    state: dict[str, Any] = module.state_dict()  # after the walk, which refuses FSDP: its state_dict() is a collective
    if not renamed:
        return state
    plain = {}
    for key, value in state.items():
        prefix = max((each for each in renamed if key.startswith(each)), key=len, default=None)
        if prefix is not None:
            key = renamed[prefix] + key[len(prefix) :]
        elif _of_wrapper(module, key):
            continue
        plain[key] = value
    return plain


def _of_wrapper(module: nn.Module, key: str) -> bool:
    """Is it a tensor of a wrapper itself, such as AveragedModel's n_averaged?"""
    owner = key.rpartition(".")[0]
    try:
        return _attribute(module.get_submodule(owner), "") is not None
    except AttributeError:  # a key that a hook has made
        return False


def spelled_in(known: Container[Key], key: Key) -> Key | None:
    """The key that a key path stands for among the known ones: itself, or without the prefixes of wrappers.

    So a state_dict() of a wrapped module can be sent. None when there is no such key, or more than one.
    """
    if key in known:
        return key
    at = [index for index, part in enumerate(key[:-1]) if part in _PREFIXES]
    left_out = (set(each) for count in range(1, len(at) + 1) for each in itertools.combinations(at[:6], count))
    found = {tuple(part for index, part in enumerate(key) if index not in each) for each in left_out}
    fitting = [each for each in found if each in known]
    return fitting[0] if len(fitting) == 1 else None


def respelled(keys: Collection[Key], known: Collection[Key]) -> dict[Key, Key]:
    """The known key of each key that is not known, where prefixes of wrappers make the difference, on either side.

    A name such as `module` may be a user's own. So prefixes are left out of all keys of a side at once, where that
    makes the two sides equal, or else where one key on each side is what is left.
    """
    unknown, free = _apart(keys, known)
    if not unknown or not free:
        return {}
    for ours, theirs in itertools.product(_levels(unknown), _levels(free)):
        same = ours.keys() & theirs.keys()
        rest = _by_rest(ours.keys() - same, theirs.keys() - same)
        if all(len(one) == len(two) == 1 for one, two in rest):
            pairs = [(key, key) for key in same] + [(one[0], two[0]) for one, two in rest]
            return {ours[one]: theirs[two] for one, two in pairs}
    return {one[0]: two[0] for one, two in _by_rest(unknown, free) if len(one) == len(two) == 1}


def open_questions(keys: Collection[Key], known: Collection[Key]) -> list[str]:
    """Where prefixes of wrappers leave open which leaf a key stands for; a sentence each."""
    found = respelled(keys, known)
    unknown, free = _apart([key for key in keys if key not in found], set(known) - set(found.values()))
    return [
        f"{_listed(one)} may stand for {_listed(two)} of the arena, without the prefixes of wrappers; use one form on "
        "both sides, such as the module itself"
        for one, two in _by_rest(unknown, free)
        if one and two
    ]


def _listed(keys: Collection[Key]) -> str:
    return " or ".join(sorted(".".join(key) for key in keys))


def _apart(keys: Collection[Key], known: Collection[Key]) -> tuple[list[Key], list[Key]]:
    """The keys that only one side has, but for the tensors of wrappers."""
    ours, theirs = set(keys), set(known)
    if ours <= theirs or theirs <= ours:
        return [], []
    own = of_wrappers(ours) | of_wrappers(theirs)
    return [key for key in keys if key not in theirs | own], [key for key in known if key not in ours | own]


def _levels(keys: Collection[Key]) -> list[dict[Key, Key]]:
    """Whole keys by what is left of them without the prefixes that all of them begin with: none, one, two, ..."""
    levels = [{key: key for key in keys}]
    while (
        len(first := {key[0] for key in levels[-1]}) == 1
        and first <= set(_PREFIXES)
        and all(len(key) > 1 for key in levels[-1])
    ):
        levels.append({key[1:]: whole for key, whole in levels[-1].items()})
    return levels


def _by_rest(ours: Collection[Key], theirs: Collection[Key]) -> list[tuple[list[Key], list[Key]]]:
    """The keys of both sides that are the same without any prefix of a wrapper."""
    found: dict[Key, tuple[list[Key], list[Key]]] = {}
    for side, keys in enumerate((ours, theirs)):
        for key in keys:
            rest = (*(part for part in key[:-1] if part not in _PREFIXES), key[-1])
            found.setdefault(rest, ([], []))[side].append(key)
    return list(found.values())


def of_wrappers(keys: Collection[Key]) -> set[Key]:
    """The keys of tensors that an AveragedModel has itself: beside them it has `module` alone."""
    found = set()
    for count in [key for key in keys if key[-1] == "n_averaged"]:
        beside = [key for key in keys if key[: len(count) - 1] == count[:-1] and key != count]
        if beside and all(key[len(count) - 1] == "module" and len(key) > len(count) for key in beside):
            found.add(count)
    return found


def wrapped_by(value: Any) -> nn.Module | None:
    """The module inside a callable that is none: functools.partial, a decorated module, a bound method of one."""
    for attribute in ("func", "__wrapped__", "__self__"):
        inner = getattr(value, attribute, None) if callable(value) else None
        if inner is not None and inner is not value:
            return inner if isinstance(inner, nn.Module) else wrapped_by(inner)
    return None
