"""A baseline without a library: the weights go through a queue to each worker, which copies them into its module.

They travel as NumPy arrays. Tensors would move into shared memory by a descriptor each: 200 small ones to 4 workers
take about fifteen times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from common import models
from sends import contest
from torch import nn


def receive(module: nn.Module, weights: dict[str, Any], queue: Any, answers: Any) -> None:
    while True:
        module.load_state_dict({name: torch.from_numpy(array) for name, array in queue.get().items()})
        answers.put(None)


class Queues:
    def __init__(self, size: str, workers: int) -> None:
        self.module = models.build(size)
        self.queues = [contest.CONTEXT.SimpleQueue() for _ in range(workers)]
        self.answers = contest.CONTEXT.SimpleQueue()
        self.workers = contest.Workers(size, receive, [(queue, self.answers) for queue in self.queues])

    def send(self) -> None:
        weights = {name: tensor.numpy() for name, tensor in self.module.state_dict().items()}
        for queue in self.queues:
            queue.put(weights)
        for _ in self.queues:
            self.answers.get()

    def close(self) -> None:
        self.workers.kill()
