"""Which weights chose the actions of a collector's frames, and what is done about old ones."""

from __future__ import annotations

import threading

import pytest
import torch

from shmsync.schemes import NoWeightSyncScheme, SharedMemWeightSyncScheme
from support.environments.basic import SCHEMES, Constant, Counting, Policy
from support.processes import until


@pytest.mark.parametrize(("scheme", "sync"), list(zip(SCHEMES, [True, False], strict=True)))
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


def test_frames_that_are_too_old_warn(collector):
    batches = collector(Counting, Constant(), sync=False, max_lag=0, num_workers=1)
    next(batches)

    def both_buffers_are_full():
        batches._pool.read(batches._pool.members[0])
        return len(batches._batches._jobs.ready()) == 2

    until(both_buffers_are_full)
    batches.update_policy_weights_()
    with pytest.warns(UserWarning, match="1 versions old"):
        next(batches)


@pytest.mark.parametrize("sync", [True, False])
def test_frames_that_are_too_old_are_collected_again(collector, sync):
    batches = collector(Counting, Constant(), sync=sync, max_lag=1, on_lag="drop", num_workers=2)
    for _ in range(30):
        batch = next(batches)
        assert batches.stats().version - int(batch["policy_version"].min()) <= 1
        batches.update_policy_weights_()
        batches.update_policy_weights_()
    assert (batches.stats().dropped > 0) == (not sync)
