"""Gymnasium spaces as tensors: which leaves an observation has, and how an action gets back to an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from ..memory.manifest import Key


def leaves(space: gymnasium.Space[Any], key: Key) -> dict[Key, torch.Tensor]:
    """The leaves of one observation, as tensors without values. A Dict space is a nested key.

    Raises TypeError for a space that has no fixed shape.
    """
    if isinstance(space, spaces.Dict):
        found: dict[Key, torch.Tensor] = {}
        for name, inner in space.spaces.items():
            found |= leaves(inner, (*key, name))
        return found
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise TypeError(
            f"an observation of {type(space).__name__} has no fixed tensor form; wrap the environment, for example "
            "with gymnasium.wrappers.FlattenObservation"
        )
    sample = torch.from_numpy(np.empty(space.shape or (), space.dtype))
    return {key: torch.empty(sample.shape, dtype=sample.dtype, device="meta")}


def part(observation: Any, path: Key) -> Any:
    """The leaf of an observation at a path below the observation itself."""
    for name in path:
        observation = observation[name]
    return observation


def to_env(space: gymnasium.Space[Any]) -> Callable[[torch.Tensor], list[Any]]:
    """How a batch of actions `[n, ...]` becomes n actions of this space. Discrete actions may be one-hot.

    The function raises ValueError for actions that do not fit.
    """
    if isinstance(space, spaces.Discrete):
        count, start = int(space.n), int(space.start)

        def discrete(actions: torch.Tensor) -> list[Any]:
            if actions.dtype.is_floating_point:
                raise ValueError(
                    f"the policy gave {actions.dtype} {tuple(actions.shape)} as actions of {space}; let it return the "
                    "index of the action, for example logits.argmax(-1)"
                )
            if actions.ndim == 2 and actions.shape[1] == count > 1:  # one-hot
                return [start + i for i in actions.to(torch.uint8).argmax(-1).tolist()]
            return actions.reshape(len(actions)).tolist()

        return discrete
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        shape, dtype = space.shape, space.dtype

        def array(actions: torch.Tensor) -> list[Any]:
            if tuple(actions.shape[1:]) != shape:
                raise ValueError(
                    f"the policy gave actions of shape {tuple(actions.shape[1:])} but {space} has {shape}; let it "
                    f"return [environments, {', '.join(map(str, shape or ()))}]"
                )
            return list(actions.detach().numpy().astype(dtype, copy=False))

        return array
    raise TypeError(f"actions of {type(space).__name__} are not supported; wrap the environment")


def as_mapping(out: Any) -> Mapping[Any, torch.Tensor]:
    """What a policy returned, by key: a tensor is the action.

    Raises TypeError when there is no action in it.
    """
    if isinstance(out, torch.Tensor):
        return {("action",): out}
    items = out.items(True, True) if hasattr(out, "batch_size") else out.items() if isinstance(out, Mapping) else ()
    found = {key if isinstance(key, tuple) else (key,): value for key, value in items}
    if ("action",) not in found:
        raise TypeError(
            f"the policy returned a {type(out).__name__} without an action; return the action, or a dict or TensorDict "
            "that has it under 'action'"
        )
    return found
