"""Gymnasium spaces as arrays: which leaves an observation has, and how an action gets back to an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ..engine.source.leaf_check import problem_with_key
from ..errors import DataMismatch
from ..memory.manifest import Key
from .env_values import cast, fit

OBSERVATION: Key = ("observation",)


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
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
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
    if part.path:
        try:
            for name in part.path:
                value = value[name]
        except (KeyError, IndexError, TypeError) as error:
            raise DataMismatch(
                f"the observation of {call} lacks {'.'.join(part.path)}. Correct the space, or what the environment "
                "returns"
            ) from error
    if type(value) is np.ndarray and value.dtype == part.dtype and value.shape == shape:
        return value
    return fit(value, part.dtype, shape, f"{'.'.join(part.key)} of {call}")


def check_alike(found: Sequence[tuple[Any, Any]], worker: int) -> None:
    """Raise DataMismatch unless these pairs of observation space and action space have the same form."""
    forms = [([(p.path, p.layout) for p in parts(seen, 0)], form(acted)) for seen, acted in found]
    for index, each in enumerate(forms):
        if each != forms[0]:
            (space, action_space), (other, other_action) = found[0], found[index]
            raise DataMismatch(
                f"environments 0 and {index} of worker {worker} have different spaces: {space} and {other}, "
                f"{action_space} and {other_action}; all environments of a collector need the same spaces"
            )


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
