"""What a collector and its workers send each other: words, and all that a worker is started with."""

from __future__ import annotations

from dataclasses import dataclass

from ..schemes import WeightSyncScheme
from .options import CollectorOptions

# The words of the trainer, then those of the worker. A message is (word, content).
START, COLLECT, LAYOUT, STATE, LOAD, STOP = "start", "collect", "layout", "state", "load", "stop"
HELLO, BATCH, ERROR, CLOSED = "hello", "batch", "error", "closed"  # and LAYOUT, STATE, LOAD: (number, answer)


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is started with."""

    index: int
    makers: bytes  # a list of functions that make an environment, by cloudpickle
    policy: bytes
    scheme: WeightSyncScheme
    options: CollectorOptions
    seed: int
    rows: tuple[int, int] = (0, 0)  # first and end: its rows of a batch, when its environments are counted
    device: str | None = None  # where the policy computes; None: where it is
