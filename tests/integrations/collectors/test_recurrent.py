"""Recurrent policies: their state goes on over an update, in every kind of collector."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.choice import first
from support.torchrl import children, parts, recurrent

PROCESSES = [MultiSyncCollector, MultiAsyncCollector, AsyncCollector]
FRAMES = 14  # 7 of each worker: no whole number of its episodes, which have 5


def begun(kind):
    policy = recurrent.Recurrent(kind)
    policy.set(0)
    return policy, recurrent.Environment(policy)


def collected(make, which, kind, **scheme):
    policy, environment = begun(kind)
    of_one = which is AsyncCollector
    collecting = make(
        policy,
        kind=(lambda envs, *args, **options: which(envs[0], *args, **options)) if of_one else which,
        env=environment,
        scheme=ShmWeightSyncScheme(**scheme),
        frames_per_batch=FRAMES,
    )
    return recurrent.collected(collecting, policy, kind)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("which", PROCESSES)
@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_the_state_goes_on_over_updates(collector, kind, which, slots):
    assert collected(collector, which, kind, slots=slots).over_updates


@pytest.mark.full  # test_fork runs the same policies
@pytest.mark.parametrize("which", first(PROCESSES))
@pytest.mark.parametrize("kind", ["LSTM", "nn.GRU"])
def test_spawn(kind, which):
    with parts.collectors("spawn") as make:
        assert collected(make, which, kind).over_updates


@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_in_one_process(kind):
    policy, environment = begun(kind)
    schemes = {"policy": ShmWeightSyncScheme()}
    options = {"frames_per_batch": FRAMES, "total_frames": -1, "track_policy_version": True}
    collecting = Collector(environment(), policy, weight_sync_schemes=schemes, **options)
    assert recurrent.collected(collecting, policy, kind).over_updates
    collecting.shutdown()


def forked(say, which, kind):
    torch.multiprocessing.set_start_method("fork", force=True)
    policy, environment = begun(kind)
    schemes = {"policy": ShmWeightSyncScheme()}
    envs = environment if which is AsyncCollector else [environment] * 2
    options = {"frames_per_batch": FRAMES, "total_frames": -1, "track_policy_version": True}
    collecting = which(envs, policy, weight_sync_schemes=schemes, **options)
    say({process._start_method for process in collecting.procs})
    say(recurrent.collected(collecting, policy, kind).over_updates > 0)
    collecting.shutdown()


@pytest.mark.full  # test_start_methods.py forks collectors
@pytest.mark.parametrize("kind", first(["GRU", "nn.LSTM"]))
@pytest.mark.parametrize("which", first(PROCESSES))
def test_fork(which, kind):
    with children.child(forked, which, kind, method="spawn") as child:
        assert child.hear() == {"fork"}
        assert child.hear() is True
        child.process.join()
        assert child.process.exitcode == 0
