"""Gymnasium spaces as tensors: which leaves an observation has, and how an action gets back to an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ..engine.source.leaf_check import problem_with_key
from ..errors import DataMismatch
from ..memory.manifest import Key
from .env_values import cast

DiscreteActions = Literal["index", "value"]
_WHOLE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
}  # fmt: skip


def leaves(space: gymnasium.Space[Any], key: Key) -> dict[Key, torch.Tensor]:
    """The leaves of one observation, as tensors without values. A Dict space is a nested key.

    Raises TypeError for a space that has no fixed shape, DataMismatch for keys that a batch cannot have.
    """
    if isinstance(space, spaces.Dict):
        found: dict[Key, torch.Tensor] = {}
        if not space.spaces:
            raise DataMismatch(
                f"{'.'.join(key)} is a Dict without keys: {space}; leave it out, or wrap the environment"
            )
        for name, inner in space.spaces.items():
            if not isinstance(name, str):
                raise DataMismatch(
                    f"the space {'.'.join(key)} has the key {name!r} ({type(name).__name__}), and the keys of a batch "
                    f"are words; name it {str(name)!r}"
                )
            if reason := problem_with_key((*key, name)):
                raise DataMismatch(f"the space {'.'.join(key)} has a key that {reason}: {name!r}")
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
    for depth, name in enumerate(path):
        try:
            observation = observation[name]
        except (KeyError, IndexError, TypeError) as error:
            has = sorted(map(str, observation)) if isinstance(observation, Mapping) else type(observation).__name__
            raise DataMismatch(
                f"the observation of {call} lacks {'.'.join(path[: depth + 1])}: it has {has}. Correct the space, or "
                "what the environment returns"
            ) from error
    return observation


def unknown(observation: Any, space: gymnasium.Space[Any], path: Key = ()) -> list[str]:
    """The keys of an observation that its space does not have."""
    if not isinstance(space, spaces.Dict) or not isinstance(observation, Mapping):
        return []
    found = [".".join((*path, str(name))) for name in observation if name not in space.spaces]
    for name, inner in space.spaces.items():
        if name in observation:
            found += unknown(observation[name], inner, (*path, name))
    return found


def form(space: gymnasium.Space[Any]) -> tuple[Any, ...]:
    """What two action spaces must have in common, so that one policy acts in both."""
    details = [np.asarray(getattr(space, name, 0)).tolist() for name in ("n", "nvec", "start")]
    return (type(space).__name__, space.shape, str(space.dtype), *details)


def to_env(
    space: gymnasium.Space[Any], discrete_actions: DiscreteActions | None = None
) -> Callable[[torch.Tensor], Any]:
    """How a batch of actions `[n, ...]` becomes n actions of this space, in a list or an array.

    Discrete actions may be one-hot.

    The function raises ValueError for actions that do not fit.
    """
    if isinstance(space, spaces.Discrete):
        return _discrete(space, discrete_actions)
    if isinstance(space, spaces.MultiDiscrete):
        started = _started(space, discrete_actions) if np.any(space.start) else None
        return _array(space, started)
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return _array(space, None)
    raise TypeError(f"actions of {type(space).__name__} are not supported; wrap the environment")


def _discrete(space: spaces.Discrete, choice: DiscreteActions | None) -> Callable[[torch.Tensor], Any]:
    count, start = int(space.n), int(space.start)
    started = _started(space, choice) if start else None

    def discrete(actions: torch.Tensor) -> list[Any]:
        if actions.dtype not in _WHOLE:
            raise DataMismatch(
                f"the policy gave {actions.dtype} {tuple(actions.shape)} as actions of {space}; let it return the "
                "index of the action, for example logits.argmax(-1)"
            )
        shape = actions.shape
        if len(shape) == 2 and shape[1] == count > 1:  # one-hot
            hot = actions != 0
            if not bool((hot.sum(-1) == 1).all()) or not bool((actions[hot] == 1).all()):
                raise DataMismatch(
                    f"the policy gave {actions.tolist()} as one-hot actions of {space}; each row must have one 1, "
                    "and 0 elsewhere"
                )
            return [start + i for i in hot.to(torch.uint8).argmax(-1).tolist()]
        if len(shape) != 1 and actions.numel() != shape[0]:
            raise DataMismatch(
                f"the policy gave actions of shape {tuple(actions.shape)} but {space} needs one index for each "
                f"environment, [{len(actions)}], or one-hot, [{len(actions)}, {count}]"
            )
        if started is not None:
            return started(actions.detach().reshape(len(actions)).numpy()).tolist()
        chosen: list[Any] = (actions if len(shape) == 1 else actions.reshape(shape[0])).tolist()
        for action in chosen:
            if not 0 <= action < count:
                raise DataMismatch(f"the policy gave the action {action}, which is not in {space}")
        return chosen

    return discrete


def _started(space: Any, choice: DiscreteActions | None) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """How actions of a space whose first one is not 0 are understood: as indices, or as values of the space."""
    count, start = np.asarray(getattr(space, "nvec", getattr(space, "n", 0))), np.asarray(space.start)
    if choice is None and np.any((start != 0) & (np.abs(start) < count)):
        raise DataMismatch(
            f"an action of {space} may be meant as an index from 0 or as a value from {start.tolist()}, and some "
            'numbers are both; say which the policy gives: discrete_actions="index" (argmax) or "value"'
        )

    def shifted(actions: NDArray[Any]) -> NDArray[Any]:
        given = actions.astype(np.int64)
        is_index, is_value = (given >= 0) & (given < count), (given >= start) & (given < start + count)
        taken = {"index": is_index, "value": is_value, None: is_index | is_value}[choice]
        if not taken.all():
            raise DataMismatch(
                f"the policy gave the actions {given.tolist()}, which are not all in {space}"
                + (f', as discrete_actions="{choice}" understands them' if choice else " or indices of it")
            )
        as_index = is_index if choice is None else np.full(given.shape, choice == "index")
        return np.where(as_index, given + start, given)

    return shifted


def _array(
    space: gymnasium.Space[Any], started: Callable[[NDArray[Any]], NDArray[Any]] | None
) -> Callable[[torch.Tensor], Any]:
    shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
    counts = getattr(space, "nvec", None) if started is None else None  # what started() gives is in the space
    counts = 2 if isinstance(space, spaces.MultiBinary) else counts

    def array(actions: torch.Tensor) -> NDArray[Any]:
        if tuple(actions.shape[1:]) != shape:
            raise DataMismatch(
                f"the policy gave actions of shape {tuple(actions.shape[1:])} but {space} has {shape}; let it "
                f"return [environments, {', '.join(map(str, shape))}]"
            )
        actions = actions.detach()
        # NumPy has no bfloat16; float32 holds each of its values.
        given = (actions.float() if actions.dtype == torch.bfloat16 else actions).numpy()
        if started is not None:
            given = started(cast(given, np.dtype(np.int64), f"the policy's action of {space}"))
        made = cast(given, dtype, f"the policy's action of {space}")
        if counts is not None and not ((made >= 0) & (made < counts)).all():
            raise DataMismatch(f"the policy gave the actions {made.tolist()}, which are not all in {space}")
        # An environment may write into its action, and the policy's tensor may be a view of the weights.
        return made.copy() if made is given else made

    return array


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
