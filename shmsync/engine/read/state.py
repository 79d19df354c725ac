"""Weights as a state_dict(): private tensors of one version by dotted key, as load_state_dict() takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...memory import devices
from ...memory.arena import Arena
from ...memory.manifest import Key, Manifest
from ...memory.torch_modes import plainly


def state_of(
    weights: Mapping[Key, torch.Tensor],
    manifest: Manifest,
    copied: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[str, torch.Tensor]:
    """The leaves that a state_dict() of the published module has: all but buffers that are never saved.

    Leaves that are one tensor in the arena are one tensor here, so that a file has them once.
    """
    made: dict[object, torch.Tensor] = {}
    state = {}
    for leaf in manifest.leaves:
        if leaf.saved:
            place = (leaf.offset, leaf.dtype, leaf.shape, leaf.strides) if leaf.nbytes else leaf.key
            if place not in made:
                made[place] = copied(weights[leaf.key])
            state[leaf.name] = made[place]
    return state


def copied_state(arena: Arena, slot: int) -> dict[str, torch.Tensor]:
    """A private copy of a slot that is not written meanwhile, complete when this returns."""
    with plainly():
        state = state_of(arena.views(slot), arena.manifest, devices.clone)
    if arena.on_device is not None:  # the next publish may write on another stream
        device = arena.on_device.device
        device.wait(device.current(), float("inf"))
    return state
