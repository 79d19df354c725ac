"""Which weights chose the actions of a collector's frames, and what is done about old ones."""

from __future__ import annotations

import threading

import pytest
import torch

from shmsync.schemes import NoWeightSyncScheme
from support.environments.basic import SCHEMES, Constant, Counting, Policy
from support.processes import until


@pytest.mark.parametrize(("scheme", "sync"), list(zip(SCHEMES, [True, False], strict=True)))
def test_every_frame_says_which_weights_chose_its_action(collector, scheme, sync):
    policy = Policy()
    policy.set_tag(1)
    batches = collector(policy=policy, sync=sync, weight_sync_scheme=scheme(), total_frames=1600)
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


def test_frames_that_are_too_old_warn(collector):
    batches = collector(Counting, Constant(), sync=False, max_lag=0, num_workers=1)
    next(batches)

    def another_is_there():
        batches._members[0].read()
        return batches._filled

    until(another_is_there)
    batches.update_policy_weights_()
    with pytest.warns(UserWarning, match="1 versions old"):
        next(batches)


def test_frames_that_are_too_old_are_collected_again(collector):
    batches = collector(Counting, Constant(), sync=False, max_lag=1, on_lag="drop", num_workers=2)
    for _ in range(30):
        batch = next(batches)
        assert batches.stats().version - int(batch["policy_version"].min()) <= 1
        batches.update_policy_weights_()
        batches.update_policy_weights_()
    assert batches.stats().dropped > 0
