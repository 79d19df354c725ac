"""Workers started by spawn, which is TorchRL's default, and by fork; the other tests use a fork server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
from torchrl.collectors import MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.calls import in_forked_child
from support.processes import alive, segments
from support.torchrl import children, parts
from support.torchrl.environments import Critic, Steps
from support.torchrl.parts import ask, tags
from support.torchrl.policies import Tagged, receiving_threads, seen


def fork_and_join():
    """The exit code of a child that ends as Python programs do."""
    child = multiprocessing.get_context("fork").Process(target=receiving_threads)
    child.start()
    child.join()
    return child.exitcode


def fork_and_leave():
    """The pid of a child that stays until it is killed."""
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1)
    return pid


def schemes_of_two():
    policy = ShmWeightSyncScheme(per_worker_weights=True)
    return {"policy": policy, "env.critic": parts.scheme_of(Critic(1), "env.critic")}


def life_of(collecting, policy):
    """The life of a collector; other files test each part alone."""
    assert tags(collecting) == [1, 1]
    policy.set(2)
    collecting.update_policy_weights_()
    assert tags(collecting) == [2, 2]
    collecting.update_policy_weights_(Tagged(4), worker_ids=[1])
    assert tags(collecting) == [2, 4]
    collecting.update_policy_weights_(Tagged(5))
    models = len(collecting._weight_sync_schemes)
    assert ask(collecting, "env.call", receiving_threads) == [models] * 2
    batch = next(iter(collecting))
    assert (seen(batch) == 5).all()
    assert set(batch["policy_version"].unique().tolist()) <= {2, 3}  # worker 1 had one update more


def second_model_of(collecting):
    assert ask(collecting, "env.critic.read") == [1, 1]
    collecting.update_policy_weights_(Critic(3), model_id="env.critic")
    assert ask(collecting, "env.critic.read") == [3, 3]
    assert tags(collecting) == [5, 5]


def last_days_of(collecting):
    """One worker exits; the other one is killed."""
    collecting.pipes[1].send((None, "close"))
    assert collecting.pipes[1].recv() == "closed"
    collecting.procs[1].join()
    with pytest.raises(shmsync.WorkerDied, match="exit code 0") as caught:
        collecting.update_policy_weights_(Tagged(6))
    assert caught.value.missing == [1]
    collecting.update_policy_weights_(Tagged(7))
    assert parts.ask_one(collecting, 0, "policy.read")["tag"] == 7
    os.kill(collecting.procs[0].pid, signal.SIGKILL)
    collecting.procs[0].join()
    with pytest.raises(shmsync.WorkerDied, match="SIGKILL") as caught:
        collecting.update_policy_weights_(Tagged(8))
    assert caught.value.missing == [0]


@pytest.mark.slow
def test_spawn():
    with parts.collectors("spawn") as make:
        policy = Tagged(1)
        collecting = make(policy, schemes=schemes_of_two())
        life_of(collecting, policy)
        second_model_of(collecting)
        last_days_of(collecting)


def test_a_worker_may_fork(collector):
    """As ParallelEnv does. What its child inherits is not the child's to give back, and hides no death."""
    collecting = collector(Tagged())
    assert ask(collecting, "env.call", fork_and_join) == [0, 0]
    collecting.update_policy_weights_(Tagged(1))
    assert tags(collecting) == [1, 1]
    children = ask(collecting, "env.call", fork_and_leave)
    try:
        collecting.update_policy_weights_(Tagged(2))
        assert tags(collecting) == [2, 2]
        os.kill(collecting.procs[1].pid, signal.SIGKILL)
        collecting.procs[1].join()
        assert alive(children[1])
        with pytest.raises(shmsync.WorkerDied) as caught:
            collecting.update_policy_weights_(Tagged(3))
        assert caught.value.missing == [1]
        collecting.update_policy_weights_(Tagged(4))
        assert parts.ask_one(collecting, 0, "policy.read")["tag"] == 4
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def forked(say):
    torch.multiprocessing.set_start_method("fork", force=True)
    policy = Tagged(1)
    schemes = schemes_of_two()
    options = {"frames_per_batch": 20, "total_frames": -1, "track_policy_version": True}
    collecting = MultiSyncCollector([Steps] * 2, policy, weight_sync_schemes=schemes, **options)
    say([process._start_method for process in collecting.procs])
    life_of(collecting, policy)
    second_model_of(collecting)
    last_days_of(collecting)
    parts.shut(schemes)
    say(segments())


@pytest.mark.slow
def test_fork():
    """With fork the scheme is not pickled: a worker has the trainer's, with everything that it holds."""
    with children.child(forked, method="spawn") as child:
        assert child.hear() == ["fork", "fork"]
        assert child.hear() == []
        child.process.join()
        assert child.process.exitcode == 0


def test_a_fork_of_the_trainer_gives_up_all_that_is_not_its_own(capfd, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's would print nothing in a child
    policy = Tagged(1)
    scheme = ShmWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, devices=["cpu"])
    scheme.connect()
    assert in_forked_child(lambda: scheme.initialized_on_sender) == (0, False)
    assert capfd.readouterr().err == ""
    scheme.shutdown()
