"""Workers that die, fail and stop while they are updated: the update names them, and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support import processes
from support.calls import Call
from support.processes import until, until_waits
from support.torchrl import policies
from support.torchrl.parts import ask, ask_one, pids, tags
from support.torchrl.policies import Acting, Remembering, Tagged, seen


def hold(policy, gate, folder):
    """Its forwards say in that folder that they have begun, and wait until there is a file of the gate's name."""
    policy.gate, policy.folder = gate, folder


def enter_forwards(collecting, folder):
    """Let every worker collect, and return when each is in a forward of its Tagged: what lets them out."""
    gate = folder / "gate"
    ask(collecting, "policy.call", hold, str(gate), str(folder))
    for pipe in collecting.pipes:
        pipe.send((None, "continue"))
    until(lambda: len(os.listdir(folder)) == collecting.num_workers)
    return gate.touch


KINDS = [MultiSyncCollector, MultiAsyncCollector]


def kill(collecting, worker):
    process = collecting.procs[worker]
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def stop(collecting, worker):
    processes.stop(collecting.procs[worker].pid)


def tag(collecting, worker):
    found = ask_one(collecting, worker, "policy.read")
    return float(found["layers.0"][0])


@pytest.mark.parametrize(("victim", "kind"), enumerate(KINDS))
def test_a_killed_worker_is_named_and_the_next_update_goes_on_without_it(collector, victim, kind):
    policy = Tagged()
    collecting = collector(policy, kind=kind)
    kill(collecting, victim)
    policy.set(1)
    with pytest.raises(shmsync.WorkerDied, match=rf"worker {victim} .*SIGKILL") as caught:
        collecting.update_policy_weights_()
    assert caught.value.missing == [victim]
    assert tag(collecting, 1 - victim) == 1  # the other has it
    for number in (2, 3):
        policy.set(number)
        collecting.update_policy_weights_()
        assert tag(collecting, 1 - victim) == number


def test_a_worker_killed_in_a_forward_while_the_update_waits_is_named(collector, tmp_path):
    policy = Tagged()
    collecting = collector(policy, frames_per_batch=2, scheme=ShmWeightSyncScheme(timeout=60))
    end_forwards = enter_forwards(collecting, tmp_path)

    def kill_when_it_waits():
        until_waits(threading.main_thread(), "_wait_until_free")
        kill(collecting, 1)
        end_forwards()

    killing = Call(kill_when_it_waits)
    policy.set(1)
    with pytest.raises(shmsync.WorkerDied) as caught:
        collecting.update_policy_weights_()
    killing.result()
    assert caught.value.missing == [1]
    policy.set(2)
    collecting.update_policy_weights_()
    assert tag(collecting, 0) == 2


def test_when_all_workers_are_dead_every_update_says_so(collector):
    collecting = collector(Tagged())
    kill(collecting, 0)
    kill(collecting, 1)
    with pytest.raises(shmsync.WorkerDied) as caught:
        collecting.update_policy_weights_()
    assert sorted(caught.value.missing) == [0, 1]
    for _ in range(2):
        with pytest.raises(shmsync.WorkerDied, match="no worker is left") as caught:
            collecting.update_policy_weights_()
        assert caught.value.missing == [0, 1]


def test_without_sync_a_death_does_not_stop_the_updates(collector):
    policy = Tagged()
    collecting = collector(policy, scheme=ShmWeightSyncScheme(sync=False))
    kill(collecting, 1)
    for number in (1, 2, 3):
        policy.set(number)
        collecting.update_policy_weights_()
    until(lambda: tag(collecting, 0) == 3)


def test_what_a_worker_raises_while_it_applies_is_raised_here_with_its_traceback(collector):
    policy = Acting(Remembering())
    collecting = collector(policy, kind=MultiAsyncCollector)
    policy.module.write("bad")
    with pytest.raises(RuntimeError, match="^a bad note$") as caught:
        collecting.update_policy_weights_()
    cause = str(caught.value.__cause__)
    assert "worker 0" in cause or "worker 1" in cause
    assert "in set_extra_state" in cause and "policies.py" in cause
    policy.module.notes.clear()
    policy.module.write("good")
    collecting.update_policy_weights_()
    assert ask(collecting, "policy.call", policies.notes) == [[(1, ["good"])]] * 2


def test_a_worker_that_fails_does_not_keep_the_others_from_applying(collector):
    collecting = collector(Acting(Remembering()), scheme=ShmWeightSyncScheme(per_worker_weights=True))
    weights = {0: Acting(Remembering(["good"])), 1: Acting(Remembering(["bad"]))}
    with pytest.raises(RuntimeError, match="a bad note") as caught:
        collecting.update_policy_weights_(weights)
    assert "worker 1" in str(caught.value.__cause__)
    assert ask_one(collecting, 0, "policy.call", policies.notes) == [(1, ["good"])]


def test_a_stopped_worker_is_late_and_works_again_when_it_goes_on(collector):
    policy = Tagged()
    collecting = collector(policy, scheme=ShmWeightSyncScheme(timeout=5.0))
    stop(collecting, 1)
    policy.set(1)
    with pytest.raises(shmsync.AckTimeout, match=rf"stopped: worker 1 \(pid {pids(collecting)[1]}\)") as caught:
        collecting.update_policy_weights_()
    assert isinstance(caught.value, TimeoutError) and caught.value.missing == [1]
    assert tag(collecting, 0) == 1
    os.kill(pids(collecting)[1], signal.SIGCONT)
    policy.set(2)
    collecting._weight_sync_schemes["policy"].send(timeout=60)
    assert tags(collecting) == [2, 2]
    assert seen(next(iter(collecting))).unique().tolist() == [2]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_worker_stopped_in_a_forward_stalls_an_update_for_no_longer_than_the_timeout(collector, slots, tmp_path):
    policy = Tagged()
    collecting = collector(policy, frames_per_batch=2, scheme=ShmWeightSyncScheme(slots=slots, timeout=1.0))
    end_forwards = enter_forwards(collecting, tmp_path)
    stop(collecting, 1)
    end_forwards()  # of the other one
    policy.set(1)
    with pytest.raises(shmsync.AckTimeout if slots == 2 else shmsync.ReaderStalled) as caught:
        collecting.update_policy_weights_()
    assert isinstance(caught.value, TimeoutError)
    os.kill(pids(collecting)[1], signal.SIGCONT)
    policy.set(2)
    collecting._weight_sync_schemes["policy"].send(timeout=60)
    assert tags(collecting) == [2, 2]
