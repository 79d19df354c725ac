"""The contestants of Ray: shmsync's scheme in both its ways, TorchRL's, and a bare ray.put().

Where RAY_ENABLE_ZERO_COPY_TORCH_TENSORS is set, tensors that this process sends arrive as views of Ray's store. Two
bare contestants are there then: one copies the weights into its module, the other binds its module to the views.
TorchRL's scheme is left out: it sends past the store. Ray reads the variable when it is imported, so such a cell has
separate processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from common import models
from ray._private.ray_constants import RAY_ENABLE_ZERO_COPY_TORCH_TENSORS as ZERO_COPY
from tensordict import TensorDict
from torch import nn

import shmsync
from remote.cell import BY_NODE, FAR, OURS, TORCHRL, Contestant, Context, build

with warnings.catch_warnings(record=True):
    from torchrl.collectors import utils as _utils  # noqa: F401  # else the first send would import it
    from torchrl.weight_update import RayWeightSyncScheme as TorchRLScheme

BARE = "bare ray.put, zero-copy tensors" if ZERO_COPY else "bare ray.put"
BOUND = f"{BARE}, bound"
STORE = 1 << 30  # bytes, on each node
QUIET: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


class Worker:
    """An actor: a method for each contestant."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        self._index = index

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def open(self, size: str, schemes: dict[str, Any]) -> None:
        self._modules = {name: build(size) for name in (OURS, BY_NODE, TORCHRL, BARE, BOUND)}
        for name in (OURS, BY_NODE):
            schemes[name].init_on_worker("policy", model=self._modules[name])
        self._ours, self._by_node = (schemes[name].get_receiver() for name in (OURS, BY_NODE))
        self._theirs = schemes[TORCHRL]
        self._context = Context(self._modules[TORCHRL], self._index)
        self._theirs.init_on_receiver(model_id="policy", context=self._context)

    def connect(self) -> None:
        self._theirs.connect(worker_idx=self._index)

    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        self._ours.apply_weights(policy_or_weights)

    def update_by_node(self, policy_or_weights: Any = None) -> None:
        self._by_node.apply_weights(policy_or_weights)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self._theirs.receive()

    def load(self, weights: dict[str, torch.Tensor], name: str) -> None:
        self._modules[name].load_state_dict(weights, assign=name == BOUND)

    def look(self, weights: dict[str, torch.Tensor]) -> tuple[int, int]:
        """A digest of what came, and how many of its tensors lie in Ray's store."""
        return models.digest(list(weights.values())), in_store(weights.values())

    def bound(self) -> tuple[int, int]:
        """How many tensors the module that is to be bound has, and how many of them lie in Ray's store."""
        tensors = models.tensors(self._modules[BOUND])
        return len(tensors), in_store(tensors)

    def digest(self, name: str) -> int:
        return models.digest(models.tensors(self._modules[name]))


class ByNode:
    """The same actor for the other scheme of shmsync, under the name of the method that it calls."""

    def __init__(self, actor: Any) -> None:
        self.update_policy_weights_ = actor.update_by_node
        self.__ray_call__ = actor.__ray_call__


def in_store(tensors: Iterable[torch.Tensor]) -> int:
    """How many of them begin in memory of Ray's store, as this process has mapped it."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines if "plasma" in line[-1]]
    return sum(any(first <= tensor.data_ptr() < last for first, last in ranges) for tensor in tensors)


class Cell:
    def __init__(self, nodes: int, workers: int) -> None:
        self._cluster: Any = None
        cpus = {"num_cpus": workers + 2, "object_store_memory": STORE}
        if nodes == 1:
            ray.init(address="local", resources={FAR: workers}, **cpus, **QUIET)
        else:
            from ray.cluster_utils import Cluster

            self._cluster = Cluster(initialize_head=True, head_node_args={**cpus, "include_dashboard": False})
            self._cluster.add_node(resources={FAR: workers}, **cpus)
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        kind = ray.remote(num_cpus=0, resources={FAR: 1})(Worker)
        self._actors = [kind.remote(index) for index in range(workers)]
        where = set(ray.get([actor.node.remote() for actor in self._actors]))
        assert len(where) == 1 and (ray.get_runtime_context().get_node_id() in where) == (nodes == 1)
        self._schemes: list[Any] = []

    def open(self, size: str, module: nn.Module) -> dict[str, Contestant]:
        for scheme in self._schemes:
            scheme.shutdown()
        actors = self._actors
        ours, by_node = shmsync.RayWeightSyncScheme(), shmsync.RayWeightSyncScheme(fan_out="node")
        theirs = TorchRLScheme()
        self._schemes = [ours, by_node, theirs]
        ray.get([actor.open.remote(size, {OURS: ours, BY_NODE: by_node, TORCHRL: theirs}) for actor in actors])
        ours.init_on_sender("policy", remote_collectors=actors, model=module)
        by_node.init_on_sender("policy", remote_collectors=[ByNode(actor) for actor in actors], model=module)
        theirs.init_on_sender(model_id="policy", remote_collectors=actors, num_workers=len(actors), model=module)
        connected = [actor.connect.remote() for actor in actors]
        theirs.connect()
        ray.get(connected)
        weights = TensorDict.from_module(module).data  # made before, so that nothing has to be extracted

        def bare(name: str) -> None:
            reference = ray.put(module.state_dict())
            ray.get([actor.load.remote(reference, name) for actor in actors])

        sends: dict[str, Callable[[], Any]] = {
            OURS: ours.get_sender().send,
            BY_NODE: by_node.get_sender().send,
            TORCHRL: lambda: theirs.send(weights),
            BARE: lambda: bare(BARE),
        }
        if ZERO_COPY:
            del sends[TORCHRL]
            sends[BOUND] = lambda: bare(BOUND)
        self._prove(module, sends)
        return {name: Contestant(send, partial(self._digests, name)) for name, send in sends.items()}

    def _digests(self, name: str) -> list[int]:
        return ray.get([actor.digest.remote(name) for actor in self._actors])

    def _prove(self, module: nn.Module, sends: dict[str, Callable[[], Any]]) -> None:
        """Do workers get views of Ray's store, of the same bytes, if and only if the variable is set?"""
        models.randomize(module)
        reference = ray.put(module.state_dict())
        tensors = models.tensors(module)
        expected = models.digest(tensors), len(tensors) if ZERO_COPY else 0
        found = ray.get([actor.look.remote(reference) for actor in self._actors])
        if set(found) != {expected}:
            raise SystemExit(f"{BARE}: workers got (digest, tensors in the store) {found} and not {expected}")
        if ZERO_COPY:
            sends[BOUND]()
            bound = ray.get([actor.bound.remote() for actor in self._actors])
            if set(bound) != {(len(tensors), len(tensors))}:
                raise SystemExit(f"{BOUND}: modules have (tensors, of them in the store) {bound}")

    def close(self) -> None:
        for scheme in self._schemes[:2]:
            scheme.shutdown()
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
