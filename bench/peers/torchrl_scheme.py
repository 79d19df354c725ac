"""TorchRL's SharedMemWeightSyncScheme without a collector, with weights that the trainer keeps apart.

A thread of the scheme applies them in each worker. send() returns when all have, and a byte lets the workers compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from baselines.torchrl_schemes import SharedMemWeightSyncScheme, shut_down
from tensordict import TensorDict

from peers import session
from peers.weights import build


class SchemeReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, scheme: Any, index: int, size: str) -> None:
        super().__init__(pipe, hold)
        self.module = build(size)
        scheme.init_on_receiver(model=self.module, model_id="policy", worker_idx=index)
        scheme.connect(worker_idx=index)

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        yield list(self.module.parameters())


class Scheme(session.Session):
    def start(self) -> None:
        self.scheme = SharedMemWeightSyncScheme()
        self.weights = TensorDict.from_module(self.module).data
        devices = [torch.device("cpu")] * self.count
        self.scheme.init_on_sender(
            weights=self.weights.clone(), devices=devices, model_id="policy", ctx=session.CONTEXT
        )
        arguments = [(self.scheme, index, self.size) for index in range(self.count)]
        self.crew = session.Crew(SchemeReader, arguments, self.folder)
        self.scheme.connect()

    def send(self) -> None:
        self.scheme.send(self.weights)
        self.crew.wake()

    def close(self) -> None:
        super().close()
        shut_down(self.scheme)
