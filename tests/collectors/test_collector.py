"""MultiprocessCollector: real Gymnasium environments in real processes."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from support import environments
from support.environments import Constant, Counting, Failing, FirstTime, Policy
from tensordict.nn import TensorDictModule

import shmsync
from shmsync.collectors import MultiprocessCollector
from shmsync.schemes import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


@pytest.fixture
def collector():
    """Makes collectors, and ends them."""
    made = []

    def make(env=environments.cartpole, policy=None, **options):
        options = {"num_workers": 2, "frames_per_batch": 40, **options}
        made.append(MultiprocessCollector(env, Policy() if policy is None else policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def flat(batch):
    return batch.clone().flatten_keys(".").to_dict()


@pytest.mark.parametrize("sync", [True, False])
def test_frames_follow_one_another(collector, sync):
    batches = collector(Counting, Constant(), frames_per_batch=24, sync=sync, total_frames=240)
    seen: dict[int, list[torch.Tensor]] = {}
    frames = 0
    for batch in batches:
        assert batch.batch_size == ((2, 12) if sync else (1, 24))
        frames += batch.numel()
        for row in batch.clone():
            seen.setdefault(int(row["worker"][0]), []).append(row)
    assert frames == 240
    for rows in seen.values():
        whole = torch.cat(rows)
        now, after = whole["observation"][:, 0], whole["next", "observation"][:, 0]
        done = whole["next", "done"][:, 0]
        assert torch.equal(now, torch.arange(len(whole)) % 5)
        assert torch.equal(after, now + 1)  # where the action led, also at the end of an episode
        assert torch.equal(done, after == 5) and torch.equal(done, whole["next", "truncated"][:, 0])
        assert not whole["next", "terminated"].any()
        assert torch.equal(whole["next", "episode_return"][:, 0].nan_to_num(-1), torch.where(done, 5.0, -1.0))


def test_the_batch_before_stays_as_it_is_while_the_next_is_collected(collector):
    batches = collector(Counting, Constant())
    first = next(batches)
    copy = flat(first)
    next(batches)
    assert all(torch.equal(value, copy[key]) for key, value in flat(first).items() if key != "next.episode_return")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_seed_gives_the_same_frames(collector, scheme):
    def run():
        torch.manual_seed(0)
        policy = Policy()
        batches = collector(policy=policy, seed=5, weight_sync_scheme=scheme(), envs_per_worker=2)
        found = []
        for _ in range(4):
            found.append(flat(next(batches)))
            with torch.no_grad():
                policy.net.weight.add_(0.1)
            batches.update_policy_weights_()
        batches.shutdown()
        return found

    first, second = run(), run()
    assert not torch.equal(first[0]["action"][0], first[0]["action"][1])  # but each environment has its own
    for one, other in zip(first, second, strict=True):
        for key in one:
            assert torch.equal(one[key].nan_to_num(-1), other[key].nan_to_num(-1)), key


def test_without_a_seed_workers_act_differently(collector):
    batch = next(collector(Counting, Policy(inputs=1)))
    assert not torch.equal(batch["action"][0], batch["action"][1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sync", [True, False])
def test_every_frame_says_which_weights_chose_its_action(collector, scheme, sync):
    policy = Policy()
    policy.set_tag(1)
    batches = collector(policy=policy, sync=sync, weight_sync_scheme=scheme(), total_frames=4000)
    sent = [1]
    stop = threading.Event()

    def train():  # in the middle of the collecting
        while not stop.is_set():
            policy.set_tag(sent[-1] + 1)
            sent.append(batches.update_policy_weights_())
            stop.wait(0.001)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        versions = set()
        for batch in batches:
            for key in ("tag", "low", "high"):
                assert torch.equal(batch[key].long(), batch["policy_version"]), key
            versions |= set(batch["policy_version"].flatten().tolist())
    finally:
        stop.set()
        trainer.join()
    assert sent == list(range(1, len(sent) + 1))
    assert len(versions) > 10 and versions <= set(sent)


def test_no_weight_sync_keeps_the_first_weights(collector):
    policy = Constant(1)
    batches = collector(Counting, policy, weight_sync_scheme=NoWeightSyncScheme())
    next(batches)
    with torch.no_grad():
        policy.action.fill_(0)
    batches.update_policy_weights_()
    batch = next(batches)
    assert batch["action"].all() and not batch["policy_version"].any()


def test_weights_reach_some_workers_only(collector):
    scheme = SharedMemWeightSyncScheme(groups=[[0], [1]])
    batches = collector(Counting, Constant(0), weight_sync_scheme=scheme)
    assert batches.update_policy_weights_(Constant(1), worker_ids=[1]) == 2
    batch = next(batches)
    assert batch["action"].float().mean(1).tolist() == [0.0, 1.0]
    assert batch["policy_version"].float().mean(1).tolist() == [1.0, 2.0]


def test_the_trainers_policy_stays_its_own(collector):
    policy = Policy()
    before = {key: value.data_ptr() for key, value in policy.state_dict().items()}
    batches = collector(policy=policy)
    next(batches)
    assert before == {key: value.data_ptr() for key, value in policy.state_dict().items()}
    assert not any(value.is_shared() for value in policy.state_dict().values())


def test_a_tensordict_module_is_a_policy(collector):
    policy = TensorDictModule(Constant(1), in_keys=["observation"], out_keys=["action"])
    batch = next(collector(Counting, policy))
    assert batch["action"].all() and batch["action"].shape == (2, 20)


def test_nested_observations_and_box_actions(collector):
    batch = next(collector(environments.Nested, environments.BoxPolicy(), envs_per_worker=2))
    assert batch.batch_size == (4, 10)
    assert batch["observation", "image"].shape == (4, 10, 3, 4) and batch["observation", "image"].dtype == torch.uint8
    assert torch.equal(batch["next", "observation", "goal"], torch.full((4, 10), 3))
    assert torch.equal(batch["action"], torch.full((4, 10, 2), 0.5))


def test_each_worker_can_have_its_own_environment(collector):
    batch = next(collector([functools.partial(Counting, 3), functools.partial(Counting, 4)], Constant()))
    assert [int(row["next", "done"].sum()) for row in batch] == [6, 5]


def test_environments_of_different_form_are_refused(collector):
    with pytest.raises(ValueError, match="same spaces"):
        collector([Counting, environments.cartpole], environments.Constant())


def test_logits_are_no_actions(collector):
    with pytest.raises(ValueError, match=r"argmax") as caught:
        collector(policy=environments.Logits())
    assert "_spaces.py" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers must be 1"),
        ({"frames_per_batch": 41}, "use 40"),
        ({"device": "cuda"}, "on the CPU"),
        ({"on_lag": "panic"}, "on_lag"),
        ({"max_lag": -1}, "max_lag"),
        ({"env": [Counting]}, "1 functions for 2 workers"),
    ],
)
def test_arguments_are_refused_before_anything_starts(collector, options, message):
    with pytest.raises(ValueError, match=message):
        collector(**options)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(("how", "words"), [("exit", "exit code 7"), ("kill", "killed by SIGKILL")])
def test_a_worker_that_dies_is_named_with_its_exit_code(collector, sync, how, words):
    batches = collector([Counting, functools.partial(Failing, how)], Constant(), sync=sync)
    with pytest.raises(shmsync.WorkerDied, match=words) as caught:
        for _ in range(20):
            next(batches)
    assert caught.value.missing == [1]


def test_a_failing_environment_raises_here_with_its_traceback(collector):
    batches = collector([Counting, functools.partial(Failing, "raise")], Constant())
    with pytest.raises(RuntimeError, match="the simulator broke") as caught:
        next(batches)
    assert "environments.py" in str(caught.value.__cause__)


def test_an_environment_that_cannot_be_made_raises_at_once(collector):
    def broken():
        raise OSError("no display")

    with pytest.raises(OSError, match="no display"):
        collector(broken, Constant())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sync", [True, False])
def test_a_killed_worker_is_restarted_and_joins_at_the_newest_version(collector, scheme, sync):
    policy = Policy()
    batches = collector(policy=policy, restart_workers=True, sync=sync, weight_sync_scheme=scheme())
    for tag in range(2, 6):
        next(batches)
        policy.set_tag(tag)
        assert batches.update_policy_weights_() == tag
    os.kill(batches._fleet.members[1].process.pid, signal.SIGKILL)
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


def test_a_send_to_a_killed_worker_restarts_it(collector):
    batches = collector(policy=Policy(), restart_workers=True)
    next(batches)
    os.kill(batches._fleet.members[0].process.pid, signal.SIGKILL)
    assert batches.update_policy_weights_() == 2
    assert batches.stats().restarts == 1
    assert torch.equal(next(batches)["policy_version"], torch.full((2, 20), 2))


def test_an_environment_that_fails_once_is_started_again(collector, tmp_path):
    failing = functools.partial(Failing, "raise", at=30, when=FirstTime(tmp_path / "failed"))
    batches = collector([Counting, failing], Constant(), restart_workers=True, total_frames=200)
    assert sum(batch.numel() for batch in batches) == 200
    assert batches.stats().restarts == 1


def test_a_worker_that_cannot_work_is_not_restarted_for_ever(collector):
    batches = collector([Counting, functools.partial(Failing, "exit")], Constant(), restart_workers=True)
    with pytest.raises(shmsync.WorkerDied, match="exit code 7"):
        next(batches)


def test_frames_that_are_too_old_warn(collector):
    batches = collector(Counting, Constant(), sync=False, max_lag=0, num_workers=1)
    next(batches)
    time.sleep(0.2)  # its second buffer is full
    batches.update_policy_weights_()
    with pytest.warns(UserWarning, match="1 versions old"):
        next(batches)


@pytest.mark.parametrize("on_lag", ["drop", "wait"])
def test_frames_that_are_too_old_are_not_handed_out(collector, on_lag):
    batches = collector(Counting, Constant(), sync=False, max_lag=1, on_lag=on_lag, num_workers=2)
    for _ in range(30):
        batch = next(batches)
        assert batches.stats().version - int(batch["policy_version"].min()) <= 1
        batches.update_policy_weights_()
        batches.update_policy_weights_()
    assert batches.stats().dropped > 0


def test_wait_keeps_the_fast_from_running_ahead_of_the_slow(collector):
    batches = collector([Counting, environments.Slow], Constant(), sync=False, max_lag=3, on_lag="wait")
    workers = []
    for _ in range(30):
        workers.append(int(next(batches)["worker"][0, 0]))
        batches.update_policy_weights_()
    assert batches.stats().dropped == 0
    assert 1 in workers[:5] and workers.count(1) >= 5


def test_a_stuck_environment_times_out(collector):
    batches = collector([Counting, environments.Slow], Constant(), timeout=0.02, frames_per_batch=400)
    with pytest.raises(shmsync.AckTimeout, match="stuck"):
        next(batches)


def test_a_loaded_state_continues_the_counts_the_policy_and_the_random_generators(collector):
    policy = Policy()
    first = collector(policy=policy, seed=3)
    next(first)
    state = first.state_dict()
    with torch.no_grad():
        policy.net.weight.zero_()

    def resumed():
        other = collector(policy=Policy(), seed=9)
        other.load_state_dict(state)
        assert other.stats().frames == 40
        assert torch.equal(other.policy.net.weight, state["policy"]["net.weight"])
        return next(other).clone()

    one, again = resumed(), resumed()
    assert torch.equal(one["observation"], again["observation"]) and torch.equal(one["action"], again["action"])
    with pytest.raises(ValueError, match="num_workers=2"):
        collector(num_workers=1, frames_per_batch=40).load_state_dict(state)


def test_a_shut_down_collector_leaves_nothing_but_its_last_batch(collector):
    collector(Counting, Constant()).shutdown()  # from here on the fork server runs
    children, fds = set(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd"))
    batches = collector(Counting, Constant())
    pids = [member.process.pid for member in batches._fleet.members.values()]
    batch = next(batches)
    batches.shutdown()
    batches.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert batch["observation"].sum() > 0
    assert set(psutil.Process().children(recursive=True)) <= children
    del batch
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds
    with pytest.raises(shmsync.ClosedError):
        next(batches)


PROGRAM = """
import sys
from support.environments import Constant, Counting
from shmsync.collectors import MultiprocessCollector
if __name__ == "__main__":
    batches = MultiprocessCollector(Counting, Constant(), num_workers=2, frames_per_batch=40, sync=False)
    next(batches)
    print(*[member.process.pid for member in batches._fleet.members.values()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_workers_go_when_the_trainer_is_killed(tmp_path, sign):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trainer = subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.send_signal(sign)
    trainer.wait()
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlive their trainer"
        time.sleep(0.05)


def test_a_batch_that_was_waited_for_too_briefly_comes_whole_later(collector):
    batches = collector(environments.Slow, Constant(), num_workers=1, frames_per_batch=40, timeout=0.05)
    waits = 0
    while True:
        try:
            batch = next(batches)
            break
        except shmsync.AckTimeout:
            waits += 1
    copy = flat(batch)
    time.sleep(0.1)  # nobody writes into it any more
    assert waits > 0
    assert torch.equal(flat(batch)["observation"], copy["observation"])
    assert torch.equal(copy["next.observation"][0, :, 0], torch.arange(40) % 5 + 1.0)


def test_dead_workers_are_restarted_and_late_ones_named(collector):
    scheme = SharedMemWeightSyncScheme(timeout=0.5)
    batches = collector(Counting, Constant(), restart_workers=True, weight_sync_scheme=scheme)
    next(batches)
    killed, stopped = (batches._fleet.members[index].process.pid for index in (0, 1))
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(shmsync.AckTimeout) as caught:
            batches.update_policy_weights_()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert caught.value.missing == [1] and batches.stats().restarts == 1
    assert batches.update_policy_weights_() == 3


def test_a_state_of_another_policy_is_refused(collector):
    batches = collector(policy=Policy())
    state = batches.state_dict()
    state["policy"].pop("net.weight")
    with pytest.raises(shmsync.ManifestMismatch, match=r"missing: net\.weight"):
        batches.load_state_dict(state)
