"""Extra state, which modules keep beside their tensors (get_extra_state()), as one more leaf of the arena.

As a leaf it changes together with the tensors. A leaf has a fixed shape, so the state is pickled into a uint8 tensor
with room to grow: 8 bytes of length, the pickle, then unused bytes.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ...engine.source.sources import EVERYTHING, collect
from ...engine.source.wrappers import walk
from ...memory.manifest import Key
from ...memory.torch_modes import run_plainly
from ...schemes.messages import dumps

LEAF = "__extra_state__"  # also TorchRL's key, in a TensorDict of weights
KEY: Key = (LEAF,)
STATE_DICT_KEY = "_extra_state"
KEYS = (LEAF, STATE_DICT_KEY)
_LENGTH_BYTES = 8
_SMALLEST = 1024  # bytes of room

States = dict[str, Any]  # what get_extra_state() returned, by the module's path


_stateless: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules without: a module is searched once


def separate(weights: Any) -> tuple[Any, States | None]:
    """Split weights into what a Publisher takes and their extra state (None: there is none). Copies nothing."""
    if isinstance(weights, nn.Module):
        states = {path: module.get_extra_state() for path, module in _with_state(weights)}
        return weights, states or None
    if isinstance(weights, TensorDictBase):
        if LEAF not in weights.keys():  # noqa: SIM118  # a TensorDict iterates over its batch
            return weights, None
        return weights.exclude(LEAF), {"": _plain(weights.get(LEAF))}
    if isinstance(weights, Mapping):
        keys = [key for key in weights if isinstance(key, str) and key.rpartition(".")[2] in KEYS]
        if keys:
            states = {key.rpartition(".")[0]: _plain(weights[key]) for key in keys}
            return {key: value for key, value in weights.items() if key not in keys}, states
    return weights, None


def together(tensors: Any, states: States, room: int = 0) -> dict[str, Any]:
    """Tensors and states as one mapping for a Publisher; the states' leaf has at least `room` bytes."""
    packed = dumps(states)
    size = max(_SMALLEST, room, 1 << (2 * len(packed) - 1).bit_length())
    return {**flat(tensors), LEAF: _leaf(packed, size)}


def fitted(tensors: Any, states: States, room: int) -> dict[str, Any] | None:
    """Tensors and states with a leaf of exactly `room` bytes; None when the states need more."""
    packed = dumps(states)
    return {**flat(tensors), LEAF: _leaf(packed, room)} if len(packed) + _LENGTH_BYTES <= room else None


def flat(tensors: Any) -> dict[str, Any]:
    """Tensors by dotted key."""
    return {".".join(key): tensor for key, tensor in collect(tensors, EVERYTHING).items()}


def unpacked(weights: TensorDictBase) -> Any:
    """Weights read from an arena, with the extra state unpacked, in a form that a scheme can send."""
    if LEAF not in weights.keys():  # noqa: SIM118  # a TensorDict iterates over its batch
        return weights
    return {**flat(weights.exclude(LEAF)), **by_key(states_in(weights.get(LEAF)))}


def by_key(states: States) -> dict[str, Any]:
    """Extra states under the keys that a state_dict has for them."""
    return {f"{path}.{STATE_DICT_KEY}" if path else STATE_DICT_KEY: state for path, state in states.items()}


def submodules(module: nn.Module) -> dict[Key, nn.Module]:
    """The module and all in it by path, without the wrappers."""
    return {place.path: place.module for place in walk(module)}


def set_states(module: nn.Module, leaf: torch.Tensor) -> None:
    """Give the module, and those in it, the state that lies in a leaf. Raises what set_extra_state() raises."""
    places = submodules(module)
    for path, state in states_in(leaf).items():
        found = places.get(tuple(path.split(".")) if path else ())
        if found is None:
            raise AttributeError(f"the module has no submodule {path!r}, which has extra state in the weights")
        found.set_extra_state(state)


def states_in(leaf: torch.Tensor) -> States:
    """The extra state that lies in a leaf, by the path of its module."""
    data = leaf.cpu().numpy()
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    states: States = pickle.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    return states


@run_plainly
def _leaf(packed: bytes, size: int) -> torch.Tensor:
    leaf = torch.zeros(size, dtype=torch.uint8, device="cpu")
    data = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    leaf[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return leaf


def _plain(state: Any) -> Any:
    # TorchRL keeps it as a TensorDict, and gives set_extra_state() this dict. A state_dict has it as it was returned.
    return state.flatten_keys(".").to_dict() if isinstance(state, TensorDictBase) else state


def _with_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules with extra state in this one, each once, with their dotted paths."""
    if module in _stateless:
        return []
    first: dict[nn.Module, str] = {}
    for path, child in submodules(module).items():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            first.setdefault(child, ".".join(path))
    if not first:
        _stateless.add(module)
    return [(path, child) for child, path in first.items()]
