"""Checks of a collector's arguments, and of the frames that its workers are going to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .buffers import Leaves


def arguments(
    num_workers: int,
    frames_per_batch: int,
    envs_per_worker: int,
    sync: bool,
    device: torch.device | str,
    on_lag: str,
    max_lag: int | None,
    makers: Sequence[Any],
) -> int:
    """Raise ValueError or TypeError for arguments that make no sense. Returns the number of environments."""
    for name, value in (("num_workers", num_workers), ("envs_per_worker", envs_per_worker)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    if len(makers) != num_workers:
        raise ValueError(
            f"create_env_fn has {len(makers)} functions for {num_workers} workers; give one for each, or one for all"
        )
    if not all(callable(maker) for maker in makers):
        raise TypeError("create_env_fn makes environments: pass a function such as lambda: gymnasium.make(...)")
    rows = num_workers * envs_per_worker
    share = rows if sync else envs_per_worker
    if frames_per_batch < 1 or frames_per_batch % share:
        raise ValueError(
            f"frames_per_batch={frames_per_batch} does not divide evenly over the {share} environment(s) of a batch; "
            f"use {max(1, round(frames_per_batch / share)) * share}"
        )
    if torch.device(device).type != "cpu":
        raise ValueError(f"collectors run their policies on the CPU in this version, not on {device}; use device='cpu'")
    if on_lag not in ("warn", "wait", "drop"):
        raise ValueError(f'on_lag is "warn", "wait" or "drop", not {on_lag!r}')
    if max_lag is not None and max_lag < 0:
        raise ValueError(f"max_lag is a number of versions, 0 or more, not {max_lag}")
    return rows


def agreed(layouts: dict[int, Leaves]) -> Leaves:
    """The layout that all workers have. Raises ValueError when they differ."""
    first = layouts[0]
    for index, layout in layouts.items():
        if layout != first:
            different = sorted(".".join(key) for key in {k for k, _ in layout.items() ^ first.items()})
            raise ValueError(
                f"workers 0 and {index} have frames of different form ({', '.join(different)}); all environments of a "
                "collector need the same spaces"
            )
    return first
