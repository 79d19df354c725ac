"""Recurrent policies: their state goes on over an update, in every kind of collector."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import children, recurrent

FRAMES = 14  # 7 of each worker: no whole number of its episodes, which have 5


def begun(kind):
    policy = recurrent.Recurrent(kind)
    policy.set(0)
    return policy, recurrent.Environment(policy)


def single(envs, *args, **options):
    return AsyncCollector(envs[0], *args, **options)


@pytest.mark.parametrize(("which", "slots"), [(MultiSyncCollector, 1), (MultiAsyncCollector, 2), (single, 1)])
@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_the_state_goes_on_over_updates(collector, kind, which, slots):
    policy, environment = begun(kind)
    scheme = ShmWeightSyncScheme(slots=slots)
    collecting = collector(policy, kind=which, env=environment, scheme=scheme, frames_per_batch=FRAMES)
    assert recurrent.collected(collecting, policy, kind).over_updates


@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_in_one_process(kind):
    policy, environment = begun(kind)
    schemes = {"policy": ShmWeightSyncScheme()}
    options = {"frames_per_batch": FRAMES, "total_frames": -1, "track_policy_version": True}
    collecting = Collector(environment(), policy, weight_sync_schemes=schemes, **options)
    assert recurrent.collected(collecting, policy, kind).over_updates
    collecting.shutdown()


def forked(say, kind):
    torch.multiprocessing.set_start_method("fork", force=True)
    policy, environment = begun(kind)
    schemes = {"policy": ShmWeightSyncScheme()}
    options = {"frames_per_batch": FRAMES, "total_frames": -1, "track_policy_version": True}
    collecting = MultiSyncCollector([environment] * 2, policy, weight_sync_schemes=schemes, **options)
    say({process._start_method for process in collecting.procs})
    say(recurrent.collected(collecting, policy, kind).over_updates > 0)
    collecting.shutdown()


@pytest.mark.full  # test_start_methods.py forks collectors
def test_fork():
    with children.child(forked, "nn.LSTM", method="spawn") as child:
        assert child.hear() == {"fork"}
        assert child.hear() is True
        child.process.join()
        assert child.process.exitcode == 0
