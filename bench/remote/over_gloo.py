"""The contestants of torch.distributed: shmsync's scheme in both its ways, TorchRL's, and bare broadcasts of gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import models
from tensordict import TensorDict
from torch import nn

import shmsync
from remote.cell import BY_NODE, OURS, TORCHRL, Contestant, Context, build
from remote.processes import Crew, join_group

with warnings.catch_warnings(record=True):
    from torchrl.collectors import utils as _utils  # noqa: F401  # else the first send would import it
    from torchrl.weight_update import DistributedWeightSyncScheme as TorchRLScheme

EACH, FLAT = "bare broadcast", "bare broadcast, flat"


def broadcast_each(module: nn.Module, _flat: torch.Tensor) -> None:
    """Straight from the trainer's parameters into those of the workers. The barrier is the answer."""
    for tensor in models.tensors(module):
        dist.broadcast(tensor, 0)
    dist.barrier()


def broadcast_flat(module: nn.Module, flat: torch.Tensor) -> None:
    """One message."""
    tensors = models.tensors(module)
    views = flat.split([tensor.numel() for tensor in tensors])
    pairs = list(zip(tensors, views, strict=True))
    if dist.get_rank() == 0:
        for tensor, view in pairs:
            view.copy_(tensor.view(-1))
    dist.broadcast(flat, 0)
    if dist.get_rank() != 0:
        state = module.state_dict()
        module.load_state_dict({name: view.view_as(state[name]) for name, view in zip(state, views, strict=True)})
    dist.barrier()


BROADCASTS = {EACH: broadcast_each, FLAT: broadcast_flat}


def store_of(name: str, size: str, store: Any) -> dist.Store:
    """The store of one of two schemes in one process group: each has its own keys."""
    return dist.PrefixStore(f"{name}, {size}", store)


def flat_like(module: nn.Module) -> torch.Tensor:
    return torch.empty(sum(tensor.numel() for tensor in models.tensors(module)))


class Worker:
    """Answers the trainer's commands from its pipe. It receives for the contestant whose turn it is; TorchRL's scheme
    has its own thread for that, which waits for its store."""

    def __init__(self, rank: int, workers: int, store: Any) -> None:
        join_group(rank, workers, store)
        self._rank = rank
        self._store = store
        self._receivers: dict[str, Any] = {}

    def __call__(self, command: str, *arguments: Any) -> Any:
        return getattr(self, command)(*arguments)

    def open(self, size: str, schemes: dict[str, Any]) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._modules = {name: build(size) for name in (OURS, BY_NODE, TORCHRL, *BROADCASTS)}
        for name in (OURS, BY_NODE):
            store = store_of(name, size, self._store)
            schemes[name].init_on_worker("policy", store=store, rank=self._rank, model=self._modules[name])
            self._receivers[name] = schemes[name].get_receiver()
        self._flat = flat_like(self._modules[FLAT])
        self._context, self._theirs = Context(self._modules[TORCHRL], self._rank), schemes[TORCHRL]
        self._theirs.init_on_receiver(model_id="policy", context=self._context, worker_idx=self._rank)
        self._theirs.connect()

    def take(self, name: str, sends: int) -> None:
        for _ in range(sends):
            if name in BROADCASTS:
                BROADCASTS[name](self._modules[name], self._flat)
            elif name != TORCHRL:
                while not self._receivers[name].receive(timeout=60):
                    pass

    def digest(self, name: str) -> int:
        return models.digest(models.tensors(self._modules[name]))


class Cell:
    def __init__(self, nodes: int, workers: int) -> None:
        self._crew = Crew(__name__, Worker, nodes, workers)
        join_group(0, workers, self._crew.store)
        self._workers = workers
        self._schemes: list[Any] = []

    def open(self, size: str, module: nn.Module) -> dict[str, Contestant]:
        self._end_ours()
        ours = {
            OURS: shmsync.DistributedWeightSyncScheme(),
            BY_NODE: shmsync.DistributedWeightSyncScheme(fan_out="node"),
        }
        theirs = TorchRLScheme()
        theirs.init_on_sender(model_id="policy", num_workers=self._workers, model=module)
        self._crew.tell("open", size, {**ours, TORCHRL: theirs})
        for name, scheme in ours.items():
            store = store_of(name, size, self._crew.store)
            scheme.init_on_sender("policy", store=store, num_workers=self._workers, model=module)
        theirs.connect()
        self._crew.answers()
        self._schemes = [*ours.values(), theirs]
        weights = TensorDict.from_module(module).data  # made before, so that nothing has to be extracted
        flat = flat_like(module)
        sends: dict[str, Callable[[], Any]] = {
            OURS: ours[OURS].get_sender().send,
            BY_NODE: ours[BY_NODE].get_sender().send,
            TORCHRL: lambda: theirs.send(weights),
            EACH: lambda: broadcast_each(module, flat),
            FLAT: lambda: broadcast_flat(module, flat),
        }
        crew = self._crew
        return {
            name: Contestant(send, partial(crew.ask, "digest", name), partial(crew.tell, "take", name))
            for name, send in sends.items()
        }

    def close(self) -> None:
        self._end_ours()
        self._crew.kill()

    def _end_ours(self) -> None:
        for scheme in self._schemes[:2]:
            scheme.shutdown()
