"""Recurrent policies: their state goes on over an update, in every kind of collector."""

from __future__ import annotations

import pytest
from torchrl.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import recurrent

FRAMES = 14  # 7 of each worker: no whole number of its episodes, which have 5


def begun(kind):
    policy = recurrent.Recurrent(kind)
    policy.set(0)
    return policy, recurrent.Environment(policy)


def single(envs, *args, **options):
    return AsyncCollector(envs[0], *args, **options)


@pytest.mark.parametrize(
    ("kind", "which", "slots"),
    [
        ("LSTM", MultiSyncCollector, 1),
        ("GRU", MultiAsyncCollector, 2),
        ("nn.LSTM", single, 1),
        ("nn.GRU", MultiSyncCollector, 2),
    ],
)
def test_the_state_goes_on_over_updates(collector, kind, which, slots):
    policy, environment = begun(kind)
    scheme = ShmWeightSyncScheme(slots=slots)
    collecting = collector(policy, kind=which, env=environment, scheme=scheme, frames_per_batch=FRAMES)
    assert recurrent.collected(collecting, policy, kind).over_updates
