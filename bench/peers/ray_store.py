"""Ray: one ray.put() for each version, and a call of each actor, whose module takes the tensors that arrive.

Without RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 these are the actor's own copy; with it they are views of Ray's store.
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch

from peers import session
from peers.weights import Extremes, build, extremes


class Actor:
    def __init__(self, size: str, hold: Any) -> None:
        torch.set_num_threads(1)
        self.module, self.hold = build(size), hold

    def pid(self) -> int:
        return os.getpid()

    def use(self, weights: dict[str, torch.Tensor]) -> Extremes:
        self.module.load_state_dict(weights, assign=True)
        self.hold()
        return extremes(list(self.module.parameters()))


class Store(session.Session):
    def __init__(self, size: str, workers: int, folder: str | None) -> None:
        super().__init__(size, workers, folder)
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=workers, object_store_memory=1 << 30, **quiet)

    def start(self) -> None:
        actor: Any = ray.remote(num_cpus=0)(Actor)
        holds = [session.Hold(self.folder) if self.folder else _pass, *[_pass] * (self.count - 1)]
        self.actors = [actor.remote(self.size, hold) for hold in holds]
        self._pids = ray.get([each.pid.remote() for each in self.actors])

    def send(self) -> None:
        weights = ray.put(self.module.state_dict())
        self.calls = [each.use.remote(weights) for each in self.actors]

    def answers(self, skip: int = 0, patience: float = 60.0) -> list[Extremes]:
        return list(ray.get(self.calls[skip:], timeout=patience))

    @property
    def pids(self) -> list[int]:
        return list(self._pids)

    def close(self) -> None:
        ray.shutdown()


def _pass() -> None:
    """Most workers stop nowhere."""
