"""What a type checker makes of the public names. Checked by `make types`; never run."""

from __future__ import annotations

import multiprocessing
import subprocess
from typing import Any, assert_type

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

import shmsync
from shmsync.collectors import CollectorStats, MultiprocessCollector


def trainer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with shmsync.Publisher(module, slots=2, dtype=torch.bfloat16, include=["*.weight"]) as pub:
        assert_type(pub, shmsync.Publisher)
        assert_type(pub.publish(), int)
        assert_type(pub.publish({"weight": torch.zeros(2)}, wait="all", timeout=1.0), int)
        assert_type(pub.publish(wait=[0, 1]), int)
        assert_type(pub.publish(wait=True, timeout=None), int)
        with pub.update(wait=True) as weights:
            assert_type(weights, TensorDictBase)
        pub.adopt(module, optimizer)
        assert_type(pub.handle, shmsync.Handle)
        assert_type(pub.state_dict(), dict[str, torch.Tensor])
        assert_type(pub.digest(), tuple[int, dict[str, str]])
        assert_type(pub.readers(), list[shmsync.ReaderInfo])
        assert_type(pub.readers()[0].state, shmsync.ProcessState)
        assert_type(pub.stats().publish, shmsync.Latency)
        assert_type(pub.stats().stalls, int)
        pub.wait_readers([0, 1], timeout=1.0, procs=[multiprocessing.Process(), 17])
        pub.wait_readers(range(2), procs={0: subprocess.Popen("true")})
        pub.publish(wait="everyone")  # type: ignore[arg-type]
        pub.stats().version = 3  # type: ignore[misc]


def casting(module: nn.Module) -> None:
    with shmsync.Publisher(module, dtype={"*.inv_freq": torch.float32, "*": torch.bfloat16}):
        pass
    shmsync.Publisher(module, timeout=None, first_version=17)
    shmsync.Publisher(module, dtype="bfloat16")  # type: ignore[arg-type]


def half(x: int) -> float:
    return x / 2


def worker(handle: shmsync.Handle, module: nn.Module) -> None:
    with shmsync.Subscriber(handle, consistency="optimistic", worker=0) as sub:
        assert_type(sub, shmsync.Subscriber)
        with sub.read(timeout=1.0) as section:
            assert_type(section, shmsync.ReadSection)
            assert_type(section.weights, TensorDictBase)
            assert_type((section.version, section.torn), tuple[int, bool])
            assert_type(section.stamp, shmsync.VersionStamp)
            assert_type(section.stamp.session, bytes)
            assert_type(section.numpy(), dict[str, Any])
        for version in sub.versions(timeout=1.0):
            assert_type(version, int)
        assert_type(sub.run(half, 2), float)
        assert_type(sub.run(half, 2, with_version=True), tuple[float, int])
        assert_type(sub.snapshot(), shmsync.Snapshot)
        assert_type(sub.snapshot().state_dict(), dict[str, torch.Tensor])
        assert_type(sub.state_dict(), dict[str, torch.Tensor])
        assert_type(sub.refresh(), bool)
        assert_type(sub.wait_version(2), int)
        assert_type(sub.publisher_alive, bool)
        assert_type(sub.session, bytes)
        assert_type(sub.stats().restarts, int)
        assert_type(sub.bind(module), nn.Module)
        assert_type(sub.bind(nn.Linear(2, 2)), nn.Linear)  # its own type
        assert_type(sub.publisher_alive, bool)
        sub.bind(module, guard=3)  # type: ignore[arg-type]
        shmsync.attach(handle, consistency="eventual")  # type: ignore[arg-type]


def sender(policy: nn.Module, pipes: list[Any]) -> None:
    scheme = shmsync.SharedMemWeightSyncScheme(slots=3, groups=[[0], [1]])
    scheme.init_on_sender("policy", pipes=pipes, model=policy)
    sender = scheme.get_sender()
    assert_type(sender, shmsync.WeightSender)
    assert_type(sender.send(policy, [0], timeout=1.0), int)
    assert_type(sender.send_async(), int)
    assert_type(sender.wait_async(), int)
    with shmsync.MultiProcessWeightSyncScheme(partial=True, dtype={"*.weight": torch.bfloat16}) as several:
        assert_type(several, shmsync.MultiProcessWeightSyncScheme)
        assert_type(several.make_strategy(), shmsync.WeightStrategy)
    shmsync.WeightStrategy("state_dict", True)  # type: ignore[call-arg]
    shmsync.MultiProcessWeightSyncScheme("pickle")  # type: ignore[arg-type]
    shmsync.WeightSyncScheme()  # type: ignore[abstract]
    transport: shmsync.TransportBackend = shmsync.MPTransport(pipes[0])
    assert_type(transport.receive_weights(), tuple[str, Any] | None)


def receiver(policy: nn.Module, pipe: Any) -> None:
    scheme = shmsync.MultiProcessWeightSyncScheme()
    scheme.init_on_worker("policy", pipe=pipe, model=policy)
    assert_type(scheme.get_receiver().receive(0.1), bool)
    assert_type(scheme.get_receiver().version, int)
    assert_type(scheme.get_receiver().worker_idx, int | None)


class Box:
    """Two methods make a transport."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        pass

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        return None


def own_transport() -> shmsync.TransportBackend:
    return Box()


def several_machines(policy: nn.Module, actors: list[Any]) -> None:
    scheme = shmsync.RayWeightSyncScheme("tensordict", fan_out="node")
    scheme.init_on_sender("policy", remote_collectors=actors, model=policy)
    assert_type(scheme.get_sender().send(timeout=5.0), int)
    transports: list[shmsync.TransportBackend] = [
        shmsync.DistributedTransport(rank=1),
        shmsync.RPCTransport(),
        shmsync.RayTransport(),
        shmsync.RayActorTransport(),
    ]
    transports[0].send_weights("policy", {})
    assert_type(shmsync.RayTransport().check_connection(), bool)
    assert_type(shmsync.RayWeightUpdater({}, actors).collector, Any)


def collector(policy: nn.Module) -> None:
    with MultiprocessCollector(lambda: None, policy, num_workers=2, frames_per_batch=20, on_lag="drop") as batches:
        for batch in batches:
            assert_type(batch, TensorDict)
        assert_type(batches.update_policy_weights_(), int)
        assert_type(batches.stats(), CollectorStats)
    MultiprocessCollector(lambda: None, policy, num_workers=2, frames_per_batch=20, on_lag="cry")  # type: ignore[arg-type]


def handler() -> list[int | str]:
    try:
        shmsync.attach("policy")
    except shmsync.AckTimeout as error:
        return error.missing
    return []
