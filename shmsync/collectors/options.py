"""What a collector and each of its workers is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..schemes import WeightSyncScheme

OnLag = Literal["warn", "drop"]

LAST_SEED = 1 << 62  # what Gymnasium, NumPy and torch all take, with room for those of each environment


@dataclass(frozen=True)
class CollectorOptions:
    """What a collector is given, checked."""

    num_workers: int
    frames_per_batch: int
    envs_per_worker: int
    total_frames: int
    seed: int | None
    max_lag: float  # math.inf: any number of versions
    on_lag: OnLag
    sync: bool
    restart_workers: bool
    timeout: float
    start_timeout: float

    def steps(self, environments: int) -> int:
        """How many steps of each environment are in a batch, where a worker has so many of them.

        Raises ValueError where the frames of a batch do not divide evenly.
        """
        share = environments * (self.num_workers if self.sync else 1)
        if self.frames_per_batch % share:
            raise ValueError(
                f"frames_per_batch={self.frames_per_batch} does not divide evenly over the {share} environment(s) of a "
                f"batch; use {max(1, round(self.frames_per_batch / share)) * share}"
            )
        return self.frames_per_batch // share


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is started with."""

    index: int
    makers: bytes  # a list of functions that make an environment, by cloudpickle
    policy: bytes
    scheme: WeightSyncScheme
    seed: int
    rows: tuple[int, int] = (0, 0)  # first and end: its rows of a batch, when its environments are counted
    device: str | None = None  # where the policy computes; None: where it is
