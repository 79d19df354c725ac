"""Gymnasium spaces as arrays, and the values of environments and policies on their way into them.

Rounding to a smaller floating dtype is expected, and so is nothing else: where the value would become another one, or
would be repeated to fill a larger shape, there is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ..engine.source.leaf_check import problem_with_key
from ..errors import DataMismatch
from ..memory.manifest import Key

OBSERVATION: Key = ("observation",)
_OBSERVED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Part(NamedTuple):
    """One leaf of the observations of a worker's environments."""

    path: Key  # below the observation itself
    now: NDArray[Any]  # what the policy sees next, `[n, ...]`, written in place
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of one environment's

    @property
    def key(self) -> Key:
        """Where it is in a batch."""
        return OBSERVATION + self.path

    @property
    def layout(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """What it is in a frame."""
        return torch.from_numpy(np.empty(0, self.dtype)).dtype, self.shape


def parts(space: gymnasium.Space[Any], count: int, path: Key = ()) -> list[Part]:
    """The leaves of the observations of so many environments. A Dict space is a nested key.

    Raises TypeError for a space that has no fixed shape, DataMismatch for keys that a batch cannot have.
    """
    if isinstance(space, spaces.Dict):
        found: list[Part] = []
        for name, inner in space.spaces.items():
            if not isinstance(name, str) or problem_with_key((name,)):
                raise DataMismatch(
                    f"the space {'.'.join(OBSERVATION + path)} has the key {name!r}, and the keys of a batch are "
                    "words; rename it"
                )
            found += parts(inner, count, (*path, name))
        return found
    if not isinstance(space, _OBSERVED):
        raise TypeError(
            f"an observation of {type(space).__name__} has no fixed tensor form; wrap the environment, for example "
            "with gymnasium.wrappers.FlattenObservation"
        )
    shape = tuple(space.shape or ())
    # Of torch, which raises for what does not fit into memory.
    now = torch.empty((count, *shape), dtype=torch.from_numpy(np.empty(0, space.dtype)).dtype, device="cpu").numpy()
    return [Part(path, now, now.dtype, shape)]


def leaf(observation: Any, part: Part, shape: tuple[int, ...], call: str) -> Any:
    """A leaf of an observation that this call returned, as it can be written. The words are made only if it cannot.

    Raises DataMismatch for one that is not there, or does not have this shape.
    """
    value = observation
    try:
        for name in part.path:
            value = value[name]
    except (KeyError, IndexError, TypeError) as error:
        raise DataMismatch(
            f"the observation of {call} lacks {'.'.join(part.path)}. Correct the space, or what the environment returns"
        ) from error
    if type(value) is np.ndarray and value.dtype == part.dtype and value.shape == shape:
        return value
    return fit(value, part.dtype, shape, f"{'.'.join(part.key)} of {call}")


def to_env(space: gymnasium.Space[Any]) -> Callable[[torch.Tensor], Any]:
    """How a batch of actions `[n, ...]` becomes n actions of this space, in a list or an array.

    An action is a value of the space; one of a Box may lie outside its bounds. The function raises DataMismatch for
    actions that do not fit.
    """
    if not isinstance(space, _OBSERVED):
        raise TypeError(f"actions of {type(space).__name__} are not supported; wrap the environment")
    shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
    is_box, is_discrete = isinstance(space, spaces.Box), isinstance(space, spaces.Discrete)
    first: Any = getattr(space, "start", 0)
    values = 2 if isinstance(space, spaces.MultiBinary) else getattr(space, "nvec", getattr(space, "n", math.inf))
    end = first + values
    if is_discrete:
        first, end = int(first), int(end)

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
            fits = is_box or bool(((made >= first) & (made < end)).all())
        if not fits:
            raise DataMismatch(f"the policy gave the actions {made.tolist()}, which are not all in {space}")
        return chosen

    return convert


def fit(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Any:
    """The value in this dtype and shape. Raises DataMismatch, which calls it `what`, where that would change it."""
    array = _as_array(value, what)
    if array.shape != shape:
        raise DataMismatch(
            f"{what} has shape {array.shape} but the space says {shape}; nothing is repeated to fill it. Correct the "
            "space, or what the environment returns"
        )
    return cast(array, dtype, what)


def one_each(values: Any, count: int, dtype: Any, what: str) -> NDArray[Any]:
    """One number or truth value for each of so many environments, `[count]`. Raises DataMismatch where it is not."""
    array = _as_array(values, what)
    if array.size != count:
        raise DataMismatch(f"{what} has shape {array.shape}, and must be one value for each of {count} environment(s)")
    return cast(array.reshape(-1), np.dtype(dtype), what)


def cast(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """The array in this dtype. Raises DataMismatch where a value would become another one."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
    kept = np.isinf(made) == np.isinf(array) if dtype.kind == "f" else made == array
    if not kept.all():
        at = np.argwhere(~np.atleast_1d(kept))[0]
        before, after = np.atleast_1d(array)[tuple(at)], np.atleast_1d(made)[tuple(at)]
        raise DataMismatch(
            f"{what} has the value {before} in {array.dtype}, which would be {after} in {dtype}; let the space "
            "have a dtype that can hold it, or convert it before"
        )
    return made


def _as_array(value: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise DataMismatch(f"{what} is a {type(value).__name__} that is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DataMismatch(f"{what} is a {type(value).__name__} with dtype {array.dtype}, and must have numbers")
    return array
