"""The contestants of torch.distributed.rpc: shmsync's scheme in both its ways, TorchRL's, and a bare rpc_async()."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import models
from tensordict import TensorDict
from torch import nn
from torch.distributed import rpc

import shmsync
from remote.cell import OURS, TORCHRL, Contestant, build
from remote.processes import PATIENCE, Crew, join_group

with warnings.catch_warnings(record=True):
    from torchrl.collectors import utils as _utils  # noqa: F401  # else the first send would import it
    from torchrl.weight_update import RPCWeightSyncScheme as TorchRLScheme

BARE = "bare rpc_async"


class Policy:
    """What a contestant has in a worker."""

    def __init__(self, size: str) -> None:
        self.policy = build(size)

    def digest(self) -> int:
        return models.digest(models.tensors(self.policy))


class Ours(Policy):
    def __init__(self, size: str, scheme: Any) -> None:
        super().__init__(size)
        scheme.init_on_worker("policy", model=self.policy)
        self.receiver = scheme.get_receiver()

    @staticmethod
    def update_policy_weights_(rref: Any, weights: Any) -> None:
        rref.local_value().receiver.apply_weights(weights)


class Theirs(Policy):
    """TorchRL's scheme calls _receive_weights_scheme(), and moves the bytes by the process group."""

    def __init__(self, size: str, scheme: Any, rank: int) -> None:
        super().__init__(size)
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self, worker_idx=rank)
        scheme.connect()

    def _receive_weights_scheme(self) -> None:
        self._scheme.receive()


class Bare(Policy):
    @staticmethod
    def load(rref: Any, weights: dict[str, torch.Tensor]) -> None:
        rref.local_value().policy.load_state_dict(weights)


class Collectors:
    """What TorchRL's sender reads of the trainer's collector."""

    collector_class = Theirs

    def __init__(self, infos: list[Any], rrefs: list[Any]) -> None:
        self.collector_infos = infos
        self.collector_rrefs = rrefs


def join(rank: int, workers: int, store: Any) -> Callable[[], None]:
    """Join the group for TorchRL's scheme, and RPC. Returns a worker's answer to the commands of its pipe: None."""
    join_group(rank, workers, store)
    port = int(store.get("rpc").decode())
    where, patience = f"tcp://127.0.0.1:{port}", PATIENCE.total_seconds()
    options = rpc.TensorPipeRpcBackendOptions(init_method=where, rpc_timeout=patience)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers + 1, rpc_backend_options=options)
    return lambda: None


def digests(rrefs: list[Any]) -> list[int]:
    return [rref.rpc_sync(timeout=60).digest() for rref in rrefs]


class Cell:
    def __init__(self, nodes: int, workers: int) -> None:
        self._crew = Crew(__name__, join, nodes, workers)
        self._crew.store.set("rpc", str(_free_port()))
        join(0, workers, self._crew.store)
        self._infos = [rpc.get_worker_info(f"worker{rank}") for rank in range(1, workers + 1)]
        self._ours: shmsync.RPCWeightSyncScheme | None = None

    def open(self, size: str, module: nn.Module) -> dict[str, Contestant]:
        self._end_ours()
        infos = self._infos
        ours = self._ours = shmsync.RPCWeightSyncScheme()
        rrefs: dict[str, list[Any]] = {OURS: [rpc.remote(info, Ours, args=(size, ours)) for info in infos]}
        ours.init_on_sender(
            "policy", collector_infos=infos, collector_rrefs=rrefs[OURS], collector_class=Ours, model=module
        )
        theirs = TorchRLScheme()
        rrefs[TORCHRL] = [rpc.remote(info, Theirs, args=(size, TorchRLScheme(), info.id)) for info in infos]
        self._collectors = Collectors(infos, rrefs[TORCHRL])
        theirs.init_on_sender(model_id="policy", context=self._collectors, num_workers=len(infos))
        theirs.connect()
        weights = TensorDict.from_module(module).data  # made before, so that nothing has to be extracted
        rrefs[BARE] = [rpc.remote(info, Bare, args=(size,)) for info in infos]

        def bare() -> None:
            state, load = module.state_dict(), Bare.load
            pairs = zip(infos, rrefs[BARE], strict=True)
            torch.futures.wait_all([rpc.rpc_async(info, load, args=(rref, state)) for info, rref in pairs])

        sends: dict[str, Callable[[], Any]] = {
            OURS: ours.get_sender().send,
            TORCHRL: lambda: theirs.send(weights),
            BARE: bare,
        }
        return {name: Contestant(send, partial(digests, rrefs[name])) for name, send in sends.items()}

    def close(self) -> None:
        self._end_ours()
        self._crew.kill()

    def _end_ours(self) -> None:
        if self._ours is not None:
            self._ours.shutdown()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
