"""Sends by Ray, torch RPC and torch.distributed: our schemes beside TorchRL's, and beside bare calls of the engine.

    make bench BENCH=distributed
    make bench BENCH=distributed ARGS="--sections ray"

All contestants of an engine are in the same 4 worker processes, each with its own module there, and take turns. All
run on this machine, so the network costs nothing: the fewer copies cross it, the more a real one would favour.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import common
import torch
import torch.distributed as dist
from common import Row, extremes, layers
from torch import nn
from torch.distributed import rpc

import shmsync

WORKERS = 4
SIZES = {"1 MB in 6 tensors": (6, 290), "100 MB in 14 tensors": (14, 1890)}
EACH, BY_NODE, TORCHRL, BARE = "to each worker", 'fan_out="node"', "TorchRL", "bare"
NAMES = (EACH, BY_NODE, TORCHRL, BARE)
PATIENCE = timedelta(seconds=common.PATIENCE)


class Ways(NamedTuple):
    """How one engine sends the trainer's module to all workers, by the name of the contestant."""

    sends: dict[str, Callable[[], Any]]  # each returns when every worker has the weights in its module
    found: Callable[[str], list[Any]]  # the extremes of a contestant's module in all workers
    expect: Callable[[str], Any] = lambda name: None  # tells workers to take part in one send; not timed


class Context:
    """What TorchRL's receivers read of a collector."""

    def __init__(self, policy: nn.Module, worker_idx: int) -> None:
        self.policy = policy
        self.worker_idx = worker_idx


def rows(engine: str, size: str, module: nn.Module, ways: Ways, bare: str) -> Iterator[Row]:
    samples: dict[str, list[float]] = {name: [] for name in ways.sends}
    for number in common.rounds(200, fewest=4, share=len(samples)):
        for name, send in ways.sends.items():
            common.fill(module, value := 1.0 + number % 8)
            ways.expect(name)
            samples[name].append(common.timed(send))
            if number in (0, 3):
                found = ways.found(name)
                assert found == [(value, value)] * WORKERS, f"{name}: workers have {found}, and {value} was sent"
    for ours in (EACH, BY_NODE):
        for theirs in (TORCHRL, BARE):
            if ours in samples and theirs in samples:
                label = bare if theirs == BARE else f"TorchRL's {engine} scheme"
                yield Row(f"{engine}, {size}, {WORKERS} workers, {ours}", samples[ours][1:], label, samples[theirs][1:])


def tensordict_of(module: nn.Module) -> Any:
    """Made before, so that TorchRL has nothing to extract."""
    from tensordict import TensorDict

    return TensorDict.from_module(module).data


# Ray


class Actor:
    """A method for each contestant."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        self._index = index

    def open(self, size: str, schemes: dict[str, Any]) -> None:
        self._modules = {name: layers(*SIZES[size]) for name in NAMES}
        for name in (EACH, BY_NODE):
            schemes[name].init_on_worker("policy", model=self._modules[name])
        self._ours = {name: schemes[name].get_receiver() for name in (EACH, BY_NODE)}
        self._theirs = schemes[TORCHRL]
        self._context = Context(self._modules[TORCHRL], self._index)
        self._theirs.init_on_receiver(model_id="policy", context=self._context)

    def connect(self) -> None:
        self._theirs.connect(worker_idx=self._index)

    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        self._ours[EACH].apply_weights(policy_or_weights)

    def update_by_node(self, policy_or_weights: Any = None) -> None:
        self._ours[BY_NODE].apply_weights(policy_or_weights)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self._theirs.receive()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self._modules[BARE].load_state_dict(weights)

    def extremes(self, name: str) -> Any:
        return extremes(self._modules[name].state_dict().values())


class ByNode:
    """The same actor for the other scheme, under the name of the method that a scheme calls."""

    def __init__(self, actor: Any) -> None:
        self.update_policy_weights_ = actor.update_by_node
        self.__ray_call__ = actor.__ray_call__


def over_ray() -> Iterator[Row]:
    common.need("ray", "torchrl")
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=WORKERS + 2, object_store_memory=1 << 30, **quiet)
    try:
        for size in SIZES:
            yield from ray_rows(size)
    finally:
        ray.shutdown()


def ray_rows(size: str) -> Iterator[Row]:
    import ray
    from torchrl.weight_update import RayWeightSyncScheme

    kind: Any = ray.remote(num_cpus=0)(Actor)
    actors = [kind.remote(index) for index in range(WORKERS)]
    module = layers(*SIZES[size])
    ours = {EACH: shmsync.RayWeightSyncScheme(), BY_NODE: shmsync.RayWeightSyncScheme(fan_out="node")}
    theirs = RayWeightSyncScheme()
    ray.get([actor.open.remote(size, {**ours, TORCHRL: theirs}) for actor in actors])
    ours[EACH].init_on_sender("policy", remote_collectors=actors, model=module)
    ours[BY_NODE].init_on_sender("policy", remote_collectors=[ByNode(actor) for actor in actors], model=module)
    theirs.init_on_sender(model_id="policy", remote_collectors=actors, num_workers=WORKERS, model=module)
    connected = [actor.connect.remote() for actor in actors]
    theirs.connect()
    ray.get(connected)
    weights = tensordict_of(module)

    def bare() -> None:
        reference = ray.put(module.state_dict())
        ray.get([actor.load.remote(reference) for actor in actors])

    sends = {name: scheme.get_sender().send for name, scheme in ours.items()}
    sends |= {TORCHRL: lambda: theirs.send(weights), BARE: bare}
    ways = Ways(sends, lambda name: ray.get([actor.extremes.remote(name) for actor in actors]))
    yield from rows("Ray", size, module, ways, "ray.put() and a call of each actor")
    for scheme in ours.values():
        scheme.shutdown()


# torch.distributed


def join_group(rank: int, port: int) -> dist.Store:
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, PATIENCE, wait_for_workers=False)
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=WORKERS + 1, timeout=PATIENCE)
    return store


def broadcast(module: nn.Module) -> None:
    """Straight from the trainer's parameters into those of the workers. The barrier is the answer."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    dist.barrier()


def group_worker(pipe: Connection, rank: int, port: int, size: str) -> None:
    """Receive for the contestant whose turn it is. TorchRL's scheme has a thread for that."""
    store = join_group(rank, port)
    modules = {name: layers(*SIZES[size]) for name in NAMES}
    schemes, receivers = pipe.recv(), {}
    for name in (EACH, BY_NODE):
        schemes[name].init_on_worker("policy", store=dist.PrefixStore(name, store), rank=rank, model=modules[name])
        receivers[name] = schemes[name].get_receiver()
    context = Context(modules[TORCHRL], rank)
    schemes[TORCHRL].init_on_receiver(model_id="policy", context=context, worker_idx=rank)
    schemes[TORCHRL].connect()
    pipe.send("connected")
    while True:
        command, name = pipe.recv()
        if command == "extremes":
            pipe.send(extremes(modules[name].state_dict().values()))
        elif name == BARE:
            broadcast(modules[name])
        elif name in receivers:
            while not receivers[name].receive(timeout=common.PATIENCE):
                pass


def over_gloo(size: str) -> Iterator[Row]:
    common.need("torchrl")
    from torchrl.weight_update import DistributedWeightSyncScheme

    module, port = layers(*SIZES[size]), free_port()
    with common.crew(group_worker, [(rank, port, size) for rank in range(1, WORKERS + 1)]) as crew:
        store = join_group(0, port)
        ours = {
            EACH: shmsync.DistributedWeightSyncScheme(),
            BY_NODE: shmsync.DistributedWeightSyncScheme(fan_out="node"),
        }
        theirs = DistributedWeightSyncScheme()
        theirs.init_on_sender(model_id="policy", num_workers=WORKERS, model=module)
        crew.send({**ours, TORCHRL: theirs})
        for name, scheme in ours.items():
            scheme.init_on_sender("policy", store=dist.PrefixStore(name, store), num_workers=WORKERS, model=module)
        theirs.connect()
        crew.answers()
        weights = tensordict_of(module)
        sends = {name: scheme.get_sender().send for name, scheme in ours.items()}
        sends |= {TORCHRL: lambda: theirs.send(weights), BARE: partial(broadcast, module)}
        ways = Ways(sends, lambda name: crew.ask(("extremes", name)), lambda name: crew.send(("take part", name)))
        yield from rows("torch.distributed", size, module, ways, "broadcast() of each tensor by gloo")
    dist.destroy_process_group()


# torch RPC


class Policy:
    """A module in a worker, of one contestant."""

    def __init__(self, size: str) -> None:
        self.policy = layers(*SIZES[size])

    def extremes(self) -> Any:
        return extremes(self.policy.state_dict().values())

    @staticmethod
    def load(rref: Any, weights: dict[str, torch.Tensor]) -> None:
        rref.local_value().policy.load_state_dict(weights)


class OurPolicy(Policy):
    def __init__(self, size: str, scheme: Any) -> None:
        super().__init__(size)
        scheme.init_on_worker("policy", model=self.policy)
        self.receiver = scheme.get_receiver()

    @staticmethod
    def update_policy_weights_(rref: Any, weights: Any) -> None:
        rref.local_value().receiver.apply_weights(weights)


class TheirPolicy(Policy):
    """TorchRL's scheme calls _receive_weights_scheme(), and moves the bytes by the process group."""

    def __init__(self, size: str, scheme: Any, rank: int) -> None:
        super().__init__(size)
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self, worker_idx=rank)
        scheme.connect()

    def _receive_weights_scheme(self) -> None:
        self._scheme.receive()


class Collectors:
    """What TorchRL's sender reads of the trainer's collector."""

    collector_class = TheirPolicy

    def __init__(self, infos: list[Any], rrefs: list[Any]) -> None:
        self.collector_infos = infos
        self.collector_rrefs = rrefs


def join_rpc(rank: int, port: int) -> None:
    join_group(rank, port)
    where = f"tcp://127.0.0.1:{port + 1}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=where, rpc_timeout=common.PATIENCE)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)


def rpc_worker(pipe: Connection, rank: int, port: int) -> None:
    join_rpc(rank, port)
    pipe.recv()  # until the benchmark closes it


def over_rpc() -> Iterator[Row]:
    common.need("torchrl")
    port = free_port()
    workers = common.Crew(rpc_worker, [(rank, port) for rank in range(1, WORKERS + 1)])
    join_rpc(0, port)
    for size in SIZES:
        yield from rpc_rows(size)
    workers.close()


def rpc_rows(size: str) -> Iterator[Row]:
    from torchrl.weight_update import RPCWeightSyncScheme

    infos = [rpc.get_worker_info(f"worker{rank}") for rank in range(1, WORKERS + 1)]
    module, ours, theirs = layers(*SIZES[size]), shmsync.RPCWeightSyncScheme(), RPCWeightSyncScheme()
    rrefs = {
        EACH: [rpc.remote(info, OurPolicy, args=(size, ours)) for info in infos],
        TORCHRL: [rpc.remote(info, TheirPolicy, args=(size, RPCWeightSyncScheme(), info.id)) for info in infos],
        BARE: [rpc.remote(info, Policy, args=(size,)) for info in infos],
    }
    ours.init_on_sender(
        "policy", collector_infos=infos, collector_rrefs=rrefs[EACH], collector_class=OurPolicy, model=module
    )
    collectors = Collectors(infos, rrefs[TORCHRL])
    theirs.init_on_sender(model_id="policy", context=collectors, num_workers=WORKERS)
    theirs.connect()
    weights = tensordict_of(module)

    def bare() -> None:
        state, pairs = module.state_dict(), zip(infos, rrefs[BARE], strict=True)
        torch.futures.wait_all([rpc.rpc_async(info, Policy.load, args=(rref, state)) for info, rref in pairs])

    sends = {EACH: ours.get_sender().send, TORCHRL: lambda: theirs.send(weights), BARE: bare}
    found = lambda name: [rref.rpc_sync(timeout=common.PATIENCE).extremes() for rref in rrefs[name]]  # noqa: E731
    yield from rows("RPC", size, module, Ways(sends, found), "rpc_async() to each worker")
    ours.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


SECTIONS = {
    "ray": [over_ray],
    "distributed": [partial(over_gloo, size) for size in SIZES],
    "rpc": [over_rpc],  # last: its agent ends with the process
}

if __name__ == "__main__":
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else whatever else runs here slows actors alone
    threading.excepthook = lambda _: None  # TorchRL's threads notice the end of their group
    arguments, rows_ = common.main(__doc__, SECTIONS)
    common.end(arguments)
