"""Digests of leaves, by which programs compare what processes have of a version."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ManifestMismatch
from ..memory.arena import Arena
from ..memory.devices import laid_out
from ..memory.manifest import Leaf, Manifest
from ..memory.torch_modes import run_plainly
from .source.leaf_check import problem_with
from .source.manifest_check import second_names
from .source.sources import collect
from .source.wrappers import unwrapped


@run_plainly
def digests_of(arena: Arena, slot: int) -> dict[str, str]:
    """The digest of each leaf in a slot that is not written meanwhile, by dotted key."""
    views = arena.views(slot)
    places: dict[tuple[int, int], str] = {}  # tied leaves have one
    found = {}
    for leaf in arena.manifest.leaves:
        place = leaf.offset, leaf.nbytes
        if place not in places:
            places[place] = _digest(views[leaf.key], leaf)
        found[leaf.name] = places[place]
    return found


@run_plainly
def digests_held(arena: Arena, slot: int, modules: Iterable[nn.Module]) -> dict[str, str]:
    """As digests_of(), but of the tensors that these modules hold now in the place of the leaves.

    Buffers that no state_dict() has are those of the slot: a bound module keeps its own. Raises TypeError for what is
    no module, ManifestMismatch for leaves that no module has, ValueError for one that two modules have differently.
    """
    by_key = arena.manifest.by_key
    found: dict[str, str] = {}
    problems = []
    for module in modules:
        for leaf, tensor in _held(module, arena.manifest):
            if not leaf.saved:
                continue
            problem = problem_with(tensor)
            if not problem and tuple(tensor.shape) != leaf.shape:
                problem = f"has shape {tuple(tensor.shape)} instead of {leaf.shape}"
            if problem:
                problems.append(f"{leaf.name} {problem}")
                continue
            digest = _digest(tensor, leaf)
            if found.setdefault(leaf.name, digest) != digest:
                raise ValueError(f"these modules have different values of {leaf.name}; call digest() for each of them")
    views = arena.views(slot)
    absent = {key for key, leaf in by_key.items() if not leaf.saved}
    found = {by_key[key].name: _digest(views[key], by_key[key]) for key in absent} | found
    named = {problem.partition(" ")[0] for problem in problems}
    problems += [f"{leaf.name} is missing" for leaf in by_key.values() if leaf.name not in found.keys() | named]
    if problems:
        raise ManifestMismatch("the modules do not hold every leaf of the arena: " + "; ".join(problems))
    return {name: found[name] for name in arena.manifest.by_name}


def _held(module: nn.Module, manifest: Manifest) -> list[tuple[Leaf, torch.Tensor]]:
    """The tensors of a module that stand for leaves: under their own names, or tied to one that does."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"digest() takes torch.nn.Module objects, not a {type(module).__name__}")
    tensors, by_key = collect(unwrapped(module), manifest), manifest.by_key
    second = second_names(tensors, by_key)
    named = ((by_key.get(second.get(key, key)), tensor) for key, tensor in tensors.items())
    return [(leaf, tensor) for leaf, tensor in named if leaf is not None]


def _digest(tensor: torch.Tensor, leaf: Leaf) -> str:
    """16 bytes of BLAKE2b, in hex, of the tensor's bytes in the order in which the leaf's lie in the arena."""
    plain = laid_out(tensor.detach().resolve_conj().resolve_neg().cpu(), leaf.strides)
    data = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
