"""Weights as a state_dict(): private tensors of one version by dotted key, as load_state_dict() takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...memory import devices
from ...memory.arena import Arena
from ...memory.manifest import Key, Manifest
from ...memory.torch_modes import plainly


def state_of(weights: Mapping[Key, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The leaves that a state_dict() of the published module has: all but buffers that are never saved.

    Leaves that are one tensor in the arena are one tensor here, so that a file has them once.
    """
    return _by_name(manifest, lambda key: weights[key])


def copied_state(arena: Arena, slot: int) -> dict[str, torch.Tensor]:
    """A private copy of a slot that is not written meanwhile, complete when this returns."""
    with plainly():
        views = arena.views(slot)
        state = _by_name(arena.manifest, lambda key: devices.clone(views[key]))
    if arena.on_device is not None:  # the next publish may write on another stream
        device = arena.on_device.device
        device.wait(device.current(), float("inf"))
    return state


def _by_name(manifest: Manifest, tensor: Callable[[Key], torch.Tensor]) -> dict[str, torch.Tensor]:
    made: dict[object, torch.Tensor] = {}
    state = {}
    for leaf in manifest.leaves:
        if leaf.saved:
            place = (leaf.offset, leaf.dtype, leaf.shape, leaf.strides) if leaf.nbytes else leaf.key
            if place not in made:
                made[place] = tensor(leaf.key)
            state[leaf.name] = made[place]
    return state
