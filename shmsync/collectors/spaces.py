"""Gymnasium spaces as tensors: which leaves an observation has, and how an action gets back to an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from ..engine.source.leaf_check import problem_with_key
from ..errors import DataMismatch
from ..memory.manifest import Key
from .env_values import cast


def leaves(space: gymnasium.Space[Any], key: Key) -> dict[Key, torch.Tensor]:
    """The leaves of one observation, as tensors without values. A Dict space is a nested key.

    Raises TypeError for a space that has no fixed shape, DataMismatch for keys that a batch cannot have.
    """
    if isinstance(space, spaces.Dict):
        found: dict[Key, torch.Tensor] = {}
        for name, inner in space.spaces.items():
            if not isinstance(name, str) or problem_with_key((name,)):
                raise DataMismatch(
                    f"the space {'.'.join(key)} has the key {name!r}, and the keys of a batch are words; rename it"
                )
            found |= leaves(inner, (*key, name))
        return found
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise TypeError(
            f"an observation of {type(space).__name__} has no fixed tensor form; wrap the environment, for example "
            "with gymnasium.wrappers.FlattenObservation"
        )
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return {key: torch.empty(tuple(space.shape or ()), dtype=dtype, device="meta")}


def part(observation: Any, path: Key, call: str) -> Any:
    """The leaf at a path below the observation that this call returned. Raises DataMismatch if it is not there."""
    try:
        for name in path:
            observation = observation[name]
    except (KeyError, IndexError, TypeError) as error:
        raise DataMismatch(
            f"the observation of {call} lacks {'.'.join(path)}. Correct the space, or what the environment returns"
        ) from error
    return observation


def form(space: gymnasium.Space[Any]) -> tuple[Any, ...]:
    """What two action spaces must have in common, so that one policy acts in both."""
    details = [np.asarray(getattr(space, name, 0)).tolist() for name in ("n", "nvec", "start")]
    return (type(space).__name__, space.shape, str(space.dtype), *details)


def to_env(space: gymnasium.Space[Any]) -> Callable[[torch.Tensor], Any]:
    """How a batch of actions `[n, ...]` becomes n actions of this space, in a list or an array.

    An action is a value of the space; one of a Box may lie outside its bounds. The function raises DataMismatch for
    actions that do not fit.
    """
    first: Any = 0
    end: Any = None
    if isinstance(space, spaces.Discrete):
        first, end = int(space.start), int(space.start + space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        first, end = space.start, space.start + space.nvec
    elif isinstance(space, spaces.MultiBinary):
        end = 2
    elif not isinstance(space, spaces.Box):
        raise TypeError(f"actions of {type(space).__name__} are not supported; wrap the environment")
    shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
    is_discrete = isinstance(space, spaces.Discrete)

    def convert(actions: torch.Tensor) -> Any:
        if tuple(actions.shape[1:]) != shape:
            form = ", ".join(map(str, ("environments", *shape)))
            example = ", for example logits.argmax(-1)" if is_discrete else ""
            raise DataMismatch(
                f"the policy gave actions of shape {tuple(actions.shape)} but {space} needs [{form}]{example}"
            )
        actions = actions.detach()
        # NumPy has no bfloat16; float32 holds each of its values.
        given = (actions.float() if actions.dtype == torch.bfloat16 else actions).numpy()
        made = cast(given, dtype, f"the policy's action of {space}")
        if is_discrete:
            chosen = made.tolist()
            fits = all(first <= action < end for action in chosen)  # sooner than NumPy, for few
        else:
            # An environment may write into its action, and the policy's tensor may be a view of the weights.
            chosen = made.copy() if made is given else made
            fits = end is None or bool(((made >= first) & (made < end)).all())
        if not fits:
            raise DataMismatch(f"the policy gave the actions {made.tolist()}, which are not all in {space}")
        return chosen

    return convert


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
