"""The tensors of a module that is to be adopted, or was: which of them are the slab, and whether they can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import ManifestMismatch
from ...memory.arena import Arena
from ...memory.manifest import Key, tie
from ..bind.module_check import refuse_max_norm
from ..source.leaf_check import problem_with
from ..source.manifest_check import elsewhere, mismatches, same_bytes, same_layout, untied
from ..source.overlaps import overlapping
from ..source.sources import EVERYTHING, Collected, Filter, collect
from ..source.tied import second_names, without
from .optimizer_hooks import state_tensors, stuck_states

_NO_TENSORS = frozenset({bool, int, float, str, type(None), tuple, list, set, dict})  # most attributes


class Parts(NamedTuple):
    """A module's tensors, checked."""

    collected: Collected
    placed: dict[Key, torch.Tensor]  # that are to be the slab
    beside: list[tuple[torch.Tensor, Key]]  # no leaves, but the memory of this one
    equal: bool  # some leaves that are one in the arena are two here, of equal values


def parts_of(
    module: nn.Module,
    arena: Arena,
    name: str,
    filter: Filter,
    optimizers: Iterable[torch.optim.Optimizer],
) -> Parts:
    """The module as it is now, and these optimizers of it.

    Raises ManifestMismatch if it does not fit the arena, ProtocolError for an embedding that writes in its forward.
    """
    refuse_max_norm(
        module,
        "but workers read adopted weights meanwhile. Build it without max_norm, and normalise the weight "
        "inside update(); or publish() the module instead of adopting it",
    )
    collected = collect(module, filter, arena.manifest)
    names = second_names(collected.tensors, arena.manifest.by_key)
    second = {key for key, first in names.items() if collected.tensors[key] is collected.tensors[first]}
    tensors = without(collected.tensors, second)
    collected = collected._replace(tensors=tensors)
    problems = mismatches(tensors, arena, partial=False, any_device=True, source_is="adopted module")
    problems = problems or [f"{each}; make the Publisher with device='same'" for each in elsewhere(tensors, arena)]
    if problems:
        raise misfit(name, problems)
    by_key = arena.manifest.by_key
    ties = {key: tie(tensor) for key, tensor in tensors.items()}
    parameters = {ties[key]: key for key, t in tensors.items() if isinstance(t, nn.Parameter)}
    parameters.pop(None, None)
    placed = {k: t for k, t in tensors.items() if isinstance(t, nn.Parameter) or ties[k] in parameters}
    apart = [
        f"{first.name} and {other.name} are one tensor in the arena but two in the module"
        for first, other in untied(tensors, arena)
        if first.key in placed or other.key in placed or not same_bytes(tensors[first.key], tensors[other.key])
    ]
    first: dict[Any, Key] = {}
    apart += [
        f"{'.'.join(first[same])} and {'.'.join(key)} are separate in the arena but one tensor in the module"
        for key in placed
        if (same := ties[key]) is not None and by_key[first.setdefault(same, key)].offset != by_key[key].offset
    ]
    others = _others(module, tensors, filter.filters)
    turned = [(t, by_key[k].strides) for k, t in placed.items() if not same_layout(t, by_key[k])]
    for optimizer in optimizers:
        others.update(state_tensors(optimizer))
        apart += stuck_states(optimizer, turned)
    apart += [
        f"{a} and {b} share memory in part, and would not after adopt(): give one of them private memory"
        for a, b in overlapping({".".join(k): t for k, t in tensors.items()} | others, {id(t) for t in placed.values()})
    ]
    if apart:
        raise misfit(name, apart)
    beside = [(t, parameters[same]) for t in others.values() if (same := tie(t)) in parameters]
    return Parts(collected, placed, beside, bool(untied(tensors, arena)))


def misfit(name: str, problems: list[str]) -> ManifestMismatch:
    """The error for a module, or an optimizer of it, that does not fit the arena of this name."""
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ManifestMismatch(
        f"the module to adopt, or adopted, does not fit arena {name!r}: {len(problems)} difference(s). "
        f"Change the module back, or make a new Publisher for it:{lines}"
    )


def _others(module: nn.Module, leaves: dict[Key, torch.Tensor], left_out: bool) -> dict[str, torch.Tensor]:
    """Tensors of the module that are no leaves: `left_out` by include= and exclude=, or plain attributes."""
    known = {id(tensor) for tensor in leaves.values()}
    found = []
    if left_out:
        found += [(".".join(key), value) for key, value in collect(module, EVERYTHING).tensors.items()]
    for prefix, child in module.named_modules():
        found += [
            (f"{prefix}.{name}" if prefix else name, value)
            for name, value in vars(child).items()
            if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor)
        ]
    return {name: value for name, value in found if id(value) not in known and problem_with(value) is None}
