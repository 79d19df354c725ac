"""A collector's workers that fail, die, are slow, or start again."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

import numpy as np
import pytest
import torch

import shmsync
from shmsync import cli
from shmsync.schemes import SharedMemWeightSyncScheme
from support.environments import basic as environments
from support.environments.basic import SCHEMES, Constant, Counting, Failing, Policy, flat


@pytest.mark.parametrize(
    ("sync", "how", "words"), [(True, "exit", "exit code 7"), (False, "kill", "killed by SIGKILL")]
)
def test_a_worker_that_dies_is_named_with_its_exit_code(collector, sync, how, words):
    batches = collector([Counting, functools.partial(Failing, how)], Constant(), sync=sync)
    with pytest.raises(shmsync.WorkerDied, match=words) as caught:
        while True:  # without sync the other worker may deliver any number of batches before
            next(batches)
    assert caught.value.missing == [1]


@pytest.mark.parametrize(("scheme", "sync"), list(zip(SCHEMES, [True, False], strict=True)))
def test_a_killed_worker_is_restarted_and_joins_at_the_newest_version(collector, scheme, sync):
    policy = Policy()
    policy.set_tag(1)  # that of version 1
    batches = collector(policy=policy, restart_workers=True, sync=sync, weight_sync_scheme=scheme())
    for tag in range(2, 6):
        next(batches)
        policy.set_tag(tag)
        assert batches.update_policy_weights_() == tag
    while not batches._members[1].delivered:  # one that never delivered anything is not started again
        next(batches)
    os.kill(batches._members[1].process.pid, signal.SIGKILL)
    seen = set()
    while batches.stats().restarts == 0 or 1 not in seen:
        batch = next(batches)
        if batches.stats().restarts:
            for row in batch:
                seen.add(int(row["worker"][0]))
                assert torch.equal(row["tag"].long(), row["policy_version"])
    assert int(batch["policy_version"].max()) == 5
    policy.set_tag(6)
    assert batches.update_policy_weights_() == 6


class Drawing(Counting):
    """Each episode is rewarded with what the process drew when the environment was made."""

    def __init__(self):
        super().__init__()
        self.drawn = np.random.rand()

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.drawn, *rest


def test_a_restarted_worker_draws_other_numbers_from_global_generators(collector):
    batches = collector(Drawing, Constant(), restart_workers=True, seed=3, num_workers=1)
    before = float(next(batches)["next", "reward"][0, 0])
    os.kill(batches._members[0].process.pid, signal.SIGKILL)
    while batches.stats().restarts == 0:
        next(batches)
    assert float(next(batches)["next", "reward"][0, 0]) != before


@pytest.mark.parametrize("restart", [False, True])
def test_other_processes_see_that_a_worker_died_until_it_is_started_again(collector, capsys, restart):
    batches = collector(policy=Policy(), restart_workers=restart)
    next(batches)
    os.kill(batches._members[1].process.pid, signal.SIGKILL)
    with contextlib.nullcontext() if restart else pytest.raises(shmsync.WorkerDied):
        next(batches)
    assert cli.main(["list"]) == 0
    assert (f": collector 1 died: pid {batches._members[1].process.pid}" in capsys.readouterr().out) == (not restart)


def test_a_send_to_a_killed_worker_restarts_it(collector):
    batches = collector(policy=Policy(), restart_workers=True)
    next(batches)
    os.kill(batches._members[0].process.pid, signal.SIGKILL)
    assert batches.update_policy_weights_() == 2
    assert batches.stats().restarts == 1
    assert torch.equal(next(batches)["policy_version"], torch.full((2, 20), 2))


def test_a_worker_that_cannot_work_is_not_restarted_for_ever(collector):
    batches = collector([Counting, functools.partial(Failing, "exit")], Constant(), restart_workers=True)
    with pytest.raises(shmsync.WorkerDied, match="exit code 7"):
        next(batches)


def test_a_batch_that_was_waited_for_too_briefly_comes_whole_later(collector):
    batches = collector(environments.Slow, Constant(), num_workers=1, frames_per_batch=40, timeout=0.05)
    with pytest.raises(shmsync.AckTimeout, match="stuck"):
        next(batches)
    batch = None
    while batch is None:
        with contextlib.suppress(shmsync.AckTimeout):
            batch = next(batches)
    copy = flat(batch)
    time.sleep(0.1)  # no worker writes into it any more
    assert torch.equal(flat(batch)["observation"], copy["observation"])
    assert torch.equal(copy["next.observation"][0, :, 0], torch.arange(40) % 5 + 1.0)


def test_only_workers_that_are_late_with_a_batch_are_named(collector):
    batches = collector(Counting, Constant(), timeout=5.0)
    next(batches)
    stopped = batches._members[1].process.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(shmsync.AckTimeout, match=f"{stopped}, stopped") as caught:
            next(batches)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert list(caught.value.missing) == [1]


def test_dead_workers_are_restarted_and_late_ones_named(collector):
    scheme = SharedMemWeightSyncScheme(timeout=2.0)
    batches = collector(Counting, Constant(), restart_workers=True, weight_sync_scheme=scheme)
    next(batches)
    killed, stopped = (batches._members[index].process.pid for index in (0, 1))
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(shmsync.WorkerDied, match=rf"worker 1 \(pid {stopped}") as caught:
            batches.update_policy_weights_()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert sorted(caught.value.missing) == [0, 1] and batches.stats().restarts == 1
    assert batches.update_policy_weights_() == 3
