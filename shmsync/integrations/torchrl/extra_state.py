"""Extra state, which modules keep beside their tensors (get_extra_state()), as one more leaf of the arena.

As a leaf it changes together with the tensors. A leaf has a fixed shape, so the state is pickled into a uint8 tensor
with room to grow. A pickle shows its own end. A policy without tensors gets this leaf too, since an arena has one leaf
at least.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ...engine.source.sources import collect
from ...engine.source.wrappers import walk
from ...errors import ManifestMismatch
from ...memory.manifest import Key
from ...memory.torch_modes import run_plainly
from ...schemes.messages import dumps
from ...schemes.strategy import STATE_KEY, extra_states

LEAF = "__extra_state__"  # also TorchRL's key, in a TensorDict of weights
KEY: Key = (LEAF,)
_SMALLEST = 1 << 16  # bytes of room

States = dict[str, Any]  # what get_extra_state() returned, by the module's dotted path

_stateless: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules without: a module is searched once


def separate(weights: Any) -> tuple[Any, States | None]:
    """Split weights into what a Publisher takes and their extra state (None: there is none). Copies nothing."""
    if isinstance(weights, nn.Module):
        if weights not in _stateless:
            states = {".".join(path): state for path, state in extra_states(weights).items()}
            tensors = flat(weights)
            if states or not tensors:
                return tensors, states
            _stateless.add(weights)
    elif isinstance(weights, TensorDictBase):
        if LEAF in weights.keys():  # noqa: SIM118  # a TensorDict iterates over its batch
            return weights.exclude(LEAF), {"": _plain(weights.get(LEAF))}
        if weights.is_empty():
            return weights, {}
    elif isinstance(weights, Mapping):
        keys = [key for key in weights if isinstance(key, str) and key.rpartition(".")[2] in (LEAF, STATE_KEY)]
        if keys or not weights:
            states = {key.rpartition(".")[0]: _plain(weights[key]) for key in keys}
            return {key: value for key, value in weights.items() if key not in keys}, states
    return weights, None


def _plain(state: Any) -> Any:
    # TorchRL keeps it as a TensorDict, and gives set_extra_state() this dict. A state_dict has it as it was returned.
    return state.flatten_keys(".").to_dict() if isinstance(state, TensorDictBase) else state


def flat(tensors: Any) -> dict[str, Any]:
    """Tensors by dotted key."""
    return {".".join(key): tensor for key, tensor in collect(tensors).items()}


@run_plainly
def together(tensors: Any, states: States | None, room: int = 0) -> Any:
    """What a Publisher takes for both. The leaf has `room` bytes; 0: it is made, with four times what it needs.

    Raises ManifestMismatch for state that has outgrown the room.
    """
    if states is None:
        return tensors
    data = dumps(states)
    room = room or max(_SMALLEST, 4 * len(data))
    if len(data) > room:
        raise ManifestMismatch(
            f"the extra state has {len(data)} bytes, but this collector was made with room for {room}; nothing was "
            "published. Make the collector when the state is about as large as it gets"
        )
    leaf = torch.zeros(room, dtype=torch.uint8, device="cpu")
    leaf[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return {**flat(tensors), LEAF: leaf}


def states_in(leaf: torch.Tensor) -> States:
    """The extra state that lies in a leaf, by the path of its module."""
    return pickle.loads(leaf.cpu().numpy().data)


def without(weights: TensorDictBase) -> TensorDictBase:
    """The tensors of an arena alone."""
    return weights.exclude(LEAF) if LEAF in weights.keys() else weights  # noqa: SIM118  # it iterates over its batch


def set_states(module: nn.Module, weights: TensorDictBase) -> None:
    """Give the module, and those in it, the state that lies in an arena. Raises what set_extra_state() raises."""
    if LEAF not in weights.keys():  # noqa: SIM118
        return
    places = {".".join(place.path): place.module for place in walk(module)}
    for path, state in states_in(weights.get(LEAF)).items():
        if path not in places:
            raise AttributeError(f"the module has no submodule {path!r}, which has extra state in the weights")
        places[path].set_extra_state(state)
