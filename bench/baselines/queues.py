"""What people write without a library: the state_dict() through a queue of torch.multiprocessing to each worker.

torch moves each tensor into shared memory by a descriptor of its own, and the worker copies it into its module.
"""

from __future__ import annotations

from typing import Any

import contest
import models
import torch.multiprocessing  # noqa: F401  # teaches the queues to send tensors by descriptor
from baselines.torchrl_schemes import more_files
from torch import nn


def receive(module: nn.Module, weights: dict[str, Any], queue: Any, answers: Any) -> None:
    more_files()
    while True:
        module.load_state_dict(queue.get())
        answers.put(None)


class Queues:
    def __init__(self, size: str, workers: int) -> None:
        more_files()
        self.module = models.build(size)
        self.queues = [contest.CONTEXT.SimpleQueue() for _ in range(workers)]
        self.answers = contest.CONTEXT.SimpleQueue()
        self.workers = contest.Workers(size, receive, [(queue, self.answers) for queue in self.queues])

    def send(self) -> None:
        weights = self.module.state_dict()
        for queue in self.queues:
            queue.put(weights)
        for _ in self.queues:
            self.answers.get()

    def close(self) -> None:
        self.workers.kill()
