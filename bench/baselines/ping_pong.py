"""The floor: the bytes copied once, a small message down every pipe, an answer from every pipe. Nothing else.

There are no versions, deadlines or liveness checks, and readers never read while bytes are written.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import models
from sends import contest
from torch import nn

MESSAGE = pickle.dumps((("policy", 12345), "update_weights"))
ANSWER = pickle.dumps((("policy", 12345), "updated"))


def receive(module: nn.Module, weights: dict[str, Any], pipe: Connection, shared: torch.Tensor) -> None:
    weights["of"] = lambda: [shared]
    while True:
        pipe.recv_bytes()
        pipe.send_bytes(ANSWER)


class PingPong:
    """Without a copy: what a scheme costs at least when trainer and workers share one memory."""

    def __init__(self, size: str, workers: int) -> None:
        shared = torch.zeros(models.nbytes(models.build(size)) // 4).share_memory_()
        self.module = nn.ParameterList([nn.Parameter(self.own(shared), requires_grad=False)])
        pairs = [contest.CONTEXT.Pipe() for _ in range(workers)]
        self.pipes = [ours for ours, _ in pairs]
        self.workers = contest.Workers(size, receive, [(theirs, shared) for _, theirs in pairs])

    def own(self, shared: torch.Tensor) -> torch.Tensor:
        return shared

    def send(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(MESSAGE)
        for pipe in self.pipes:
            pipe.recv_bytes()

    def close(self) -> None:
        self.workers.kill()


class PingPongAndCopy(PingPong):
    """With one flat copy, by memcpy or by torch, whichever is faster for these bytes."""

    def own(self, shared: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros_like(shared)
        to, source, count = shared.data_ptr(), flat.data_ptr(), flat.nbytes
        ways = [lambda: ctypes.memmove(to, source, count), lambda: shared.copy_(flat)]

        def seconds(way: Any) -> float:
            start = time.perf_counter()
            way()
            return time.perf_counter() - start

        self.copy = min(ways, key=lambda way: min(seconds(way) for _ in range(5)))
        self._kept = shared, flat  # their addresses are used
        return flat

    def send(self) -> None:
        self.copy()
        super().send()
