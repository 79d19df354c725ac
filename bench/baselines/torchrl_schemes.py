"""TorchRL's schemes as contestants, used without a collector, in the cheapest way that its API has.

On the CPU both schemes turn the module that they are given into shared memory: trainer, buffer and workers are one
storage, and a send copies nothing. That is what the classes with Alias in their names measure. The others keep the
trainer's weights its own, as shmsync does by default. Weights are given as a TensorDict that was made before, so that
nothing has to be extracted from a module.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from common import models
from common.environment import more_files
from sends import contest
from tensordict import TensorDict
from torch import nn

with warnings.catch_warnings(record=True):
    from torchrl.collectors import utils as _utils  # noqa: F401  # else the first send would import it
    from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme


def shut_down(scheme: Any) -> None:
    """Shut the scheme down after its workers were killed."""
    for queues in (scheme._weight_init_queues, scheme._instruction_queues, scheme._ack_queues):
        for queue in queues.values():
            queue.cancel_join_thread()  # it has no reader any more, and shutdown() would wait for one
    scheme.shutdown()


def receive(module: nn.Module, weights: dict[str, Any], scheme: Any, index: int) -> None:
    """Sleep, while the scheme's own thread applies and answers."""
    more_files()
    scheme.init_on_receiver(model=module, model_id="policy", worker_idx=index)
    scheme.connect(worker_idx=index)
    threading.Event().wait()


class SharedMem:
    kind: Any = SharedMemWeightSyncScheme
    alias = False

    def __init__(self, size: str, workers: int) -> None:
        more_files()
        self.module, self.scheme = models.build(size), self.kind()
        source: dict[str, Any] = {"model": self.module}
        if not self.alias:
            source = {"weights": TensorDict.from_module(self.module).data.clone()}
        devices = [torch.device("cpu")] * workers
        self.scheme.init_on_sender(**source, devices=devices, model_id="policy", ctx=contest.CONTEXT)
        self.weights = TensorDict.from_module(self.module).data
        self.workers = contest.Workers(size, receive, [(self.scheme, index) for index in range(workers)])
        self.scheme.connect()

    def send(self) -> None:
        self.scheme.send(self.weights)

    def close(self) -> None:
        self.workers.kill()
        shut_down(self.scheme)


class SharedMemAlias(SharedMem):
    alias = True

    def send(self) -> None:
        self.scheme.send(None)


class MultiProcess(SharedMem):
    kind = MultiProcessWeightSyncScheme

    def send(self) -> None:
        self.scheme.send(self.weights.clone())


class MultiProcessAlias(SharedMem):
    kind = MultiProcessWeightSyncScheme
    alias = True
