"""The modules in a module, without the wrappers: torch.compile(), DataParallel, DDP, AveragedModel, checkpoints.

A wrapper puts a module inside another one, and a name of its own into each key. The keys of an arena lack that name,
wherever in the tree the wrapper is, so trainer and workers may each be wrapped or not. In a module a wrapper is known
by its type, since `module` may be a user's own name. The keys of a state_dict() show the name alone: respelled().
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from ...errors import ManifestMismatch
from ...memory.manifest import Key
from .leaf_check import check_depth, loaded_class

# (module, class, attribute that holds the wrapped module); one that is not loaded can have no instance
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", ""),
)
_NAMES = frozenset(attribute for _, _, attribute in _WRAPPERS) - {""}


class Submodule(NamedTuple):
    """A module in the tree of another one."""

    path: Key  # without the wrappers
    module: nn.Module


def walk(module: nn.Module) -> Iterator[Submodule]:
    """The module and all in it, each as often as it occurs, in the order of named_modules().

    Raises ManifestMismatch for FSDP's FullyShardedDataParallel, whose parameters are pieces of flat ones.
    """
    kinds = {kind: name for home, each, name in _WRAPPERS if (kind := loaded_class(home, each)) is not None}
    types = tuple(kinds)
    waiting: list[tuple[Key, nn.Module]] = [((), module)]
    while waiting:  # no recursion: a generator inside a generator would pass each module up through all levels
        path, each = waiting.pop()
        check_depth(path)
        while isinstance(each, types):
            name = next(name for kind, name in kinds.items() if isinstance(each, kind))
            if not name:
                raise ManifestMismatch(
                    f"{'.'.join(path) or 'the module'} is a FullyShardedDataParallel, and its parameters are pieces of "
                    "flat ones; nothing was changed. Pass the full weights: torch.distributed.checkpoint.state_dict."
                    "get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), which all ranks "
                    "must call"
                )
            each = each._modules[name]
        yield Submodule(path, each)
        waiting += [((*path, name), child) for name, child in reversed(each._modules.items()) if child is not None]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that is meant: the one inside the wrappers. Raises as walk() does."""
    return next(walk(module)).module


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


def respelled(tensors: Mapping[Key, Any], known: Collection[Key]) -> dict[Key, Any]:
    """These tensors, each under the known key that is the same as its own without the names of wrappers.

    `module` may be a user's own name. So a key that both sides have stands for itself, and of the others those count
    which only one key of each side is the same as.
    """
    ours, theirs = _by_bare(tensors.keys() - set(known)), _by_bare(set(known) - tensors.keys())
    names = {ours[each]: theirs[each] for each in ours.keys() & theirs.keys()}
    return {names.get(key, key): tensor for key, tensor in tensors.items()}


def _by_bare(keys: Collection[Key]) -> dict[Key, Key]:
    """These keys by themselves without the names of wrappers, a user's own `module` included."""
    found: dict[Key, list[Key]] = {}
    for key in keys:
        bare = (*(part for part in key[:-1] if part not in _NAMES), *key[-1:])
        found.setdefault(bare, []).append(key)
    return {bare: each[0] for bare, each in found.items() if len(each) == 1}


def of_wrappers(keys: Collection[Key]) -> set[Key]:
    """The keys of the counts that an AveragedModel has itself, which are no weights: beside them is its `module`."""
    names = {".".join(key): key for key in keys}
    counts = [name for name in names if name.rpartition(".")[2] == "n_averaged"]
    beside = {name: name.removesuffix("n_averaged") + "module." for name in counts}
    return {names[name] for name in counts if any(other.startswith(beside[name]) for other in names)}


def without(tensors: Mapping[Key, Any], names: Container[Key]) -> dict[Key, Any]:
    """These tensors but for those of these names."""
    return {key: tensor for key, tensor in tensors.items() if key not in names}
