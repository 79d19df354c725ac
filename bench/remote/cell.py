"""One cell of distributed.py, in separate processes: an engine, a number of nodes, a number of workers.

    python bench/remote/cell.py ENGINE NODES WORKERS SECONDS RESULT.json SIZE...

Everything that an engine offers is in the same trainer and the same worker processes, and sends the same module in
turns. Each has its own module in each worker.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import models
from common.measure import percentiles, timed
from torch import nn

WIDTHS: dict[str, list[int]] = {  # of the layers of a policy; a layer has two tensors
    "1 MB": [64, 464, 464, 8],
    "100 MB": [1890] * 8,
}
TURN = {"1 MB": 5, "100 MB": 1}  # sends
FEWEST = 5  # rounds, however slow
OURS, BY_NODE, TORCHRL = "shmsync", "shmsync, by node", "TorchRL"
FAR = "far"  # what the second node is called


class Contestant(NamedTuple):
    """One way to send the trainer's module to all workers."""

    send: Callable[[], Any]  # returns when every worker has the weights in its module
    digests: Callable[[], list[int]]  # of the modules of all workers
    expect: Callable[[int], Any] = lambda sends: None  # tells the workers, if they have to take part; not timed


class Context:
    """What TorchRL's receivers read of a collector."""

    def __init__(self, policy: nn.Module, worker_idx: int) -> None:
        self.policy = policy
        self.worker_idx = worker_idx


def build(size: str) -> nn.Module:
    widths = WIDTHS[size]
    module = nn.Sequential(*(nn.Linear(*pair, device="meta") for pair in itertools.pairwise(widths)))
    module.to_empty(device="cpu").requires_grad_(False)
    for tensor in models.tensors(module):
        tensor.zero_()
    return module


def measure(contestants: dict[str, Contestant], module: nn.Module, size: str, seconds: float) -> dict[str, Any]:
    """Run rounds in which each contestant sends, another one first each time. Checksums come before and after."""
    for _ in range(2):  # the first send makes connections and arenas
        check(contestants, module)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    end, rounds = time.monotonic() + seconds, 0
    while rounds < FEWEST or time.monotonic() < end:
        for name in order:
            contestants[name].expect(TURN[size])
            for _ in range(TURN[size]):
                models.step(module)
                samples[name].append(timed(contestants[name].send))
        order.append(order.pop(0))
        rounds += 1
    check(contestants, module)
    result: dict[str, Any] = {"rounds": rounds, "bytes": models.nbytes(module), "contestants": {}}
    for name, times in samples.items():
        p50, p99 = percentiles(times)
        result["contestants"][name] = {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "sends": len(times)}
    return result


def check(contestants: dict[str, Contestant], module: nn.Module) -> None:
    """Raise SystemExit unless every worker and the trainer have the sent weights after each contestant's send."""
    for name, contestant in contestants.items():
        models.randomize(module)
        expected = models.digest(models.tensors(module))
        contestant.expect(1)
        contestant.send()
        wrong = [index for index, found in enumerate(contestant.digests()) if found != expected]
        if wrong or models.digest(models.tensors(module)) != expected:
            raise SystemExit(f"{name}: a checksum is wrong, of workers {wrong} or of the trainer")


def main() -> None:
    engine, nodes, workers, seconds, result, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    cell = importlib.import_module(f"remote.over_{engine}").Cell(int(nodes), int(workers))
    gc.freeze()  # later collections skip the objects of the imports
    rows = []
    try:
        for size in sizes:
            module = build(size)
            row = measure(cell.open(size, module), module, size, float(seconds))
            rows.append({"size": size, "nodes": int(nodes), "workers": int(workers), **row})
        Path(result).write_text(json.dumps(rows))
    finally:
        cell.close()
    os._exit(0)  # agents of RPC and threads of TorchRL's would wait for others that are gone


if __name__ == "__main__":
    main()
