"""Checks of a collector's arguments, and of the frames that its workers are going to write."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch

from ...errors import DataMismatch
from ..buffers import Leaves

_LARGEST = 1 << 48  # of anything that is counted
LAST_SEED = 1 << 62  # what Gymnasium, NumPy and torch all take, with room for those of each environment


class CollectorNumbers(NamedTuple):
    """The numbers that a collector is given, as ints."""

    num_workers: int
    frames_per_batch: int
    envs_per_worker: int
    total_frames: int
    seed: int | None
    max_lag: int | None


def whole(name: str, value: SupportsIndex, low: int, high: int = _LARGEST) -> int:
    """A whole number from `low` to `high`, of any library. Raises TypeError or ValueError for what is none."""
    boolean = isinstance(value, (bool, np.bool_)) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    try:
        if boolean:
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} is a whole number, {low} or more, not {value!r} ({type(value).__name__}); give it as an int"
        ) from None
    if found < low:
        raise ValueError(f"{name} must be {low} or more, not {found}")
    if found > high:
        raise ValueError(f"{name} must be {high} or less, not {found}")
    return found


def arguments(
    numbers: CollectorNumbers, on_lag: str, discrete_actions: str | None, makers: Sequence[Any], envs_in_threads: bool
) -> None:
    """Raise ValueError or TypeError for arguments that make no sense."""
    if len(makers) != numbers.num_workers:
        raise ValueError(
            f"create_env_fn has {len(makers)} functions for {numbers.num_workers} workers; give one for each, or one "
            "for all"
        )
    if not all(callable(maker) for maker in makers):
        raise TypeError("create_env_fn makes environments: pass a function such as lambda: gymnasium.make(...)")
    if not isinstance(envs_in_threads, bool):
        raise TypeError(
            f"envs_in_threads is True or False, not {envs_in_threads!r} ({type(envs_in_threads).__name__}); how many "
            "environments a worker has is envs_per_worker="
        )
    if on_lag not in ("warn", "wait", "drop"):
        raise ValueError(f'on_lag is "warn", "wait" or "drop", not {on_lag!r}')
    if discrete_actions not in (None, "index", "value"):
        raise ValueError(f'discrete_actions is None, "index" or "value", not {discrete_actions!r}')


def steps(numbers: CollectorNumbers, environments: int, sync: bool) -> int:
    """How many steps of each environment are in a batch, where a worker has so many of them.

    Raises ValueError where the frames of a batch do not divide evenly.
    """
    share = environments * (numbers.num_workers if sync else 1)
    frames = numbers.frames_per_batch
    if frames % share:
        raise ValueError(
            f"frames_per_batch={frames} does not divide evenly over the {share} environment(s) of a batch; "
            f"use {max(1, round(frames / share)) * share}"
        )
    return frames // share


def agreed(layouts: dict[int, tuple[Leaves, int]]) -> tuple[Leaves, int]:
    """The layout and the number of environments that all workers have. Raises ValueError when they differ."""
    first, count = layouts[0]
    for index, (layout, environments) in layouts.items():
        if layout != first:
            different = sorted(".".join(key) for key in {k for k, _ in layout.items() ^ first.items()})
            raise ValueError(
                f"workers 0 and {index} have frames of different form ({', '.join(different)}); all environments of a "
                "collector need the same spaces"
            )
        if environments != count:
            raise DataMismatch(
                f"worker 0 has {count} environment(s) but worker {index} has {environments}; each needs the same "
                "number, also inside of vector environments"
            )
    return first, count
