"""Ray's object store: one ray.put() of the state_dict(), a call of each actor, and load_state_dict() in it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import ray
import torch
from common import models


class Worker:
    """An actor, which has its own copy of the module."""

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        self._module = models.build(size)

    def pid(self) -> int:
        return os.getpid()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self._module.load_state_dict(weights)

    def digest(self) -> int:
        return models.digest(models.tensors(self._module))


class Actors:
    """The interface of contest.Workers, with processes that Ray starts."""

    def __init__(self, size: str, workers: int) -> None:
        actor: Any = ray.remote(num_cpus=0)(Worker)
        self.actors = [actor.remote(size) for _ in range(workers)]
        self.processes = [SimpleNamespace(pid=pid) for pid in ray.get([each.pid.remote() for each in self.actors])]

    def digests(self) -> list[int]:
        return list(ray.get([each.digest.remote() for each in self.actors]))


class RayStore:
    def __init__(self, size: str, workers: int) -> None:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=workers, object_store_memory=1 << 28, **quiet)
        self.module = models.build(size)
        self.workers = Actors(size, workers)

    def send(self) -> None:
        weights = ray.put(self.module.state_dict())
        ray.get([each.load.remote(weights) for each in self.workers.actors])

    def close(self) -> None:
        ray.shutdown()
