"""Schemes that a collector of TorchRL's cannot use: refused while it is made, with what to give it instead."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector

import shmsync
from shmsync import schemes
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged

REFUSED = (AttributeError, shmsync.ProtocolError)
OVER_NETWORK = {"backend": "gloo", "launcher": "mp"}


def make(kind, scheme, **options):
    envs = Steps if kind is Collector else [Steps] * 2
    options = {"frames_per_batch": 10, "total_frames": 20, **options}
    return kind(envs, Tagged(), weight_sync_schemes={"policy": scheme}, **options)


@pytest.mark.parametrize(
    ("kind", "scheme", "advice"),
    [
        (Collector, schemes.SharedMemWeightSyncScheme, "ShmWeightSyncScheme"),
        (Collector, ShmWeightSyncScheme, "leave weight_sync_schemes= out"),
        (MultiSyncCollector, schemes.SharedMemWeightSyncScheme, "ShmWeightSyncScheme"),
        (MultiAsyncCollector, schemes.MultiProcessWeightSyncScheme, "ShmWeightSyncScheme"),
        (MultiSyncCollector, schemes.NoWeightSyncScheme, "Leave weight_sync_schemes= out"),
        (DistributedCollector, schemes.SharedMemWeightSyncScheme, "DistributedWeightSyncScheme"),
        (DistributedCollector, ShmWeightSyncScheme, "DistributedWeightSyncScheme"),
    ],
)
def test_it_is_refused_before_a_process_starts(kind, scheme, advice):
    options = OVER_NETWORK if kind is DistributedCollector else {}
    with parts.starting(), pytest.raises(REFUSED, match=advice):
        make(kind, scheme(), **options)
    torch.set_num_threads(1)  # a collector changes it


def test_a_collector_that_a_worker_makes_for_another_machine_refuses_it():
    """RPCCollector gives its schemes to its workers' collectors before it initialises them in the trainer."""
    collecting = Collector(Steps(), Tagged(), frames_per_batch=5, total_frames=10)
    given = ShmWeightSyncScheme()
    with pytest.raises((*REFUSED, RuntimeError), match=r"RPCWeightSyncScheme\(\)"):
        collecting.register_scheme_receiver({"policy": given})
    collecting.shutdown()
    given.shutdown()
