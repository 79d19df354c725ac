"""The observations of a worker's environments: where the newest of them lie, and whether one fits its space."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import DataMismatch
from ...memory.manifest import Key
from .. import spaces
from ..buffers import frame
from ..env_values import fit

OBSERVATION: Key = ("observation",)


class Part(NamedTuple):
    """One leaf of the observations."""

    path: Key  # below the observation itself
    now: NDArray[Any]  # what the policy sees next, `[n, ...]`, written in place
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of one environment's

    @property
    def key(self) -> Key:
        """Where it is in a batch."""
        return OBSERVATION + self.path


class Observations:
    """The newest observations of so many environments of one space."""

    def __init__(self, space: gymnasium.Space[Any], count: int) -> None:
        self.space = space
        leaves = spaces.leaves(space, OBSERVATION)
        self.layout = frame(leaves)
        self.parts = []
        for key, leaf in leaves.items():
            now = torch.empty((count, *leaf.shape), dtype=leaf.dtype, device="cpu").numpy()
            self.parts.append(Part(key[1:], now, now.dtype, now.shape[1:]))

    def of_rows(self, rows: slice) -> Observations:
        """Those of some of the environments, in the same memory."""
        some = copy.copy(self)
        some.parts = [part._replace(now=part.now[rows]) for part in self.parts]
        return some

    @property
    def now(self) -> list[NDArray[Any]]:
        """The leaves of what the policy sees next, `[n, ...]`."""
        return [part.now for part in self.parts]


def leaf(observation: Any, part: Part, shape: tuple[int, ...], call: str) -> Any:
    """A leaf of an observation, as it can be written. The words are made only if it cannot.

    Raises DataMismatch for one that is not there, or does not have this shape.
    """
    value = spaces.part(observation, part.path, call)
    if type(value) is np.ndarray and value.dtype == part.dtype and value.shape == shape:
        return value
    return fit(value, part.dtype, shape, f"{'.'.join(part.key)} of {call}")


def check_alike(found: Sequence[tuple[Any, Any]], worker: int) -> None:
    """Raise DataMismatch unless these pairs of observation space and action space have the same form."""
    space, action_space = found[0]
    layout, form = frame(spaces.leaves(space, OBSERVATION)), spaces.form(action_space)
    for index, (other, other_action) in enumerate(found):
        if frame(spaces.leaves(other, OBSERVATION)) != layout or spaces.form(other_action) != form:
            raise DataMismatch(
                f"environments 0 and {index} of worker {worker} have different spaces: {space} and {other}, "
                f"{action_space} and {other_action}; all environments of a collector need the same spaces"
            )


_RETURNED = {
    "step()": ("observation", "reward", "terminated", "truncated", "info"),
    "reset()": ("observation", "info"),
}


def check_returned(result: Any, call: str) -> None:
    """Raise DataMismatch for what is not the tuple that this call returns in Gymnasium's API."""
    names = _RETURNED[call]
    if type(result) is not tuple or len(result) != len(names):
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise DataMismatch(
            f"{call} returned {what}, and must return a tuple: {', '.join(names)}, as Gymnasium's API says"
        )
