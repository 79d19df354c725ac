"""Schemes that a collector of TorchRL's cannot use: refused while it is made, with what to give it instead."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torchrl.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector

import shmsync
from shmsync import schemes
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged

OWN_WORKERS = [
    kind
    for name in schemes.__all__
    if isinstance(kind := getattr(schemes, name), type) and issubclass(kind, schemes.WeightSyncScheme)
    if not inspect.isabstract(kind)
]
HERE = [Collector, AsyncCollector, MultiSyncCollector, MultiAsyncCollector]
REFUSED = (AttributeError, shmsync.ProtocolError)


def advice(scheme, kind):
    """What the refusal recommends."""
    if scheme is schemes.NoWeightSyncScheme:
        return r"Leave weight_sync_schemes= out"
    own = {"RayCollector": "RayWeightSyncScheme", "DistributedCollector": "DistributedWeightSyncScheme"}
    return rf"{kind.__name__}.* {own.get(kind.__name__, r'shmsync.integrations.torchrl.ShmWeightSyncScheme')}\(\)"


def make(kind, scheme, **options):
    envs = Steps if kind in (Collector, AsyncCollector) else [Steps] * 2
    options = {"frames_per_batch": 10, "total_frames": 20, **options}
    return kind(envs, Tagged(), weight_sync_schemes={"policy": scheme}, **options)


def made(scheme):
    return scheme(module_path="env") if "module_path" in inspect.signature(scheme).parameters else scheme()


@pytest.mark.parametrize("kind", [*HERE, DistributedCollector])
@pytest.mark.parametrize("scheme", OWN_WORKERS)
def test_a_scheme_for_workers_of_ones_own_is_refused_before_a_process_starts(scheme, kind):
    options = {"backend": "gloo", "launcher": "mp"} if kind is DistributedCollector else {}
    with parts.starting(), pytest.raises(REFUSED, match=advice(scheme, kind)):
        make(kind, made(scheme), **options)
    torch.set_num_threads(1)  # a collector changes it


def test_it_is_refused_for_a_collector_over_torch_distributed():
    with pytest.raises(shmsync.ProtocolError, match=r"DistributedCollector takes .*DistributedWeightSyncScheme\(\)"):
        make(DistributedCollector, ShmWeightSyncScheme(), backend="gloo", launcher="mp")


@pytest.mark.parametrize("scheme", [*OWN_WORKERS, ShmWeightSyncScheme])
def test_a_collector_that_a_worker_makes_for_another_machine_refuses_it(scheme):
    """RPCCollector gives its schemes to its workers' collectors before it initialises them in the trainer."""
    collecting = Collector(Steps(), Tagged(), frames_per_batch=5, total_frames=10)
    given = made(scheme)
    with pytest.raises((*REFUSED, RuntimeError), match=r"Leave weight_sync_schemes= out|RPCWeightSyncScheme\(\)"):
        collecting.register_scheme_receiver({"policy": given})
    collecting.shutdown()
    given.shutdown()


class TestRay:
    @pytest.fixture(scope="class", autouse=True)
    def ray(self):
        pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")
        from support.remote import ray_parts

        with ray_parts.one_node():
            yield

    @pytest.mark.parametrize("scheme", [*OWN_WORKERS, ShmWeightSyncScheme])
    def test_it_is_refused_before_it_reaches_an_actor(self, scheme):
        from torchrl.collectors.distributed import RayCollector

        expected = r"RayCollector takes RayWeightSyncScheme\(\)"
        if scheme is not ShmWeightSyncScheme:
            expected = advice(scheme, RayCollector)
        with pytest.raises(shmsync.ProtocolError, match=expected):
            RayCollector([], nn.Linear(1, 1), frames_per_batch=1, weight_sync_schemes={"policy": made(scheme)})
