"""shmsync's schemes as contestants: what a user writes, and nothing else."""

from __future__ import annotations

from typing import Any

from common import models
from torch import nn

from sends import contest
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme


def receive(module: nn.Module, weights: dict[str, Any], scheme: Any, pipe: Any, index: int) -> None:
    scheme.init_on_worker("policy", pipe=pipe, model=module, worker_idx=index)
    receiver = scheme.get_receiver()
    while True:
        receiver.receive(timeout=60)


class SharedMem:
    def __init__(self, size: str, workers: int) -> None:
        self.module = models.build(size)
        self.scheme = self.make()
        pipes = [contest.CONTEXT.Pipe() for _ in range(workers)]
        arguments = [(self.scheme, theirs, index) for index, (_, theirs) in enumerate(pipes)]
        self.workers = contest.Workers(size, receive, arguments)
        ours = [pipe for pipe, _ in pipes]
        self.scheme.init_on_sender("policy", model=self.module, pipes=ours, procs=self.workers.processes)
        self.sender = self.scheme.get_sender()

    def make(self) -> Any:
        return SharedMemWeightSyncScheme(timeout=60)

    def send(self) -> None:
        self.sender.send()

    def close(self) -> None:
        self.workers.kill()
        self.scheme.shutdown()


class MultiProcess(SharedMem):
    def make(self) -> Any:
        return MultiProcessWeightSyncScheme(timeout=60)
