"""Under updates in a row, a frame says which weights made it, and no forward sees two versions.

TorchRL's own scheme applies in a thread, whatever the policy is doing. In frames of a policy with 20 weights of 100,000
elements 0.6 to 2.3 % of the forwards had seen two versions, and the version that 1.1 % of the frames gave was not the
one of their weights.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import environments, parts, policies
from support.torchrl.policies import Tagged, seen

BOTH = [(MultiSyncCollector, 1), (MultiAsyncCollector, 3)]  # with so many slots
ENOUGH = 12  # updates


class Trainer(threading.Thread):
    """Sends one update after the other; `update(n)` sends update n, by default the policy with n in all its weights."""

    def __init__(self, collecting, policy, update=None):
        super().__init__(daemon=True)
        self.collecting, self.policy = collecting, policy
        self.update = update or self.send
        self.sent, self.error, self.stop = 0, None, threading.Event()

    def send(self, number):
        self.policy.set(number)
        self.collecting.update_policy_weights_()

    def run(self):
        try:
            while not self.stop.is_set():
                self.update(self.sent + 1)
                self.sent += 1
                self.stop.wait(0.0005)
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def training(collecting, policy, update=None):
    trainer = Trainer(collecting, policy, update)
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.stop.set()
        trainer.join()
    assert trainer.error is None, trainer.error


def true(frames, tags=None):
    """The versions that frames give: each is that of the weights that chose its action."""
    tags = seen(frames) if tags is None else tags
    assert torch.equal(frames["next", "policy_version"], tags)
    assert torch.equal(frames["policy_version"], tags)
    return set(tags.flatten().tolist())


def true_actions(frames):
    """The same of a policy whose action is its version."""
    return true(frames, frames["action"].squeeze(-1).long())


def collect(collecting, policy, check=true, enough=ENOUGH, update=None):
    """Until frames gave enough different versions; these."""
    found = set()
    with training(collecting, policy, update) as trainer:
        for batch in collecting:
            found |= check(batch)
            if len(found) >= enough or trainer.error is not None:
                break
    assert max(found) <= trainer.sent
    return found


@pytest.mark.parametrize(("kind", "slots"), BOTH)
def test_a_frame_gives_the_version_that_made_it(collector, kind, slots):
    policy = Tagged(pause=0.001)
    collecting = collector(policy, kind=kind, scheme=ShmWeightSyncScheme(slots=slots))
    assert len(collect(collecting, policy)) >= ENOUGH


@pytest.mark.parametrize(("kind", "slots"), BOTH)
def test_no_forward_of_a_large_policy_sees_two_versions(collector, kind, slots):
    policy = Tagged(layers=20, size=100_000)
    collecting = collector(policy, kind=kind, scheme=ShmWeightSyncScheme(slots=slots), frames_per_batch=60)
    assert len(collect(collecting, policy, enough=100)) >= 100


OPTIONS = [
    {"device": "cpu"},
    {"policy_device": "cpu"},  # with which TorchRL hands the policy a copy of the frame
    {"env_device": "cpu"},
    {"storing_device": "cpu"},
    {"reset_at_each_iter": True},
    {"scheme": {"sync": False}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_every_option(collector, options):
    policy = Tagged(pause=0.001)
    scheme = ShmWeightSyncScheme(**options.get("scheme", {}))
    collecting = collector(policy, **{**options, "scheme": scheme})
    assert len(collect(collecting, policy)) >= ENOUGH


def test_a_policy_that_is_a_plain_module(collector):
    policy = policies.PlainTagged(pause=0.001)
    assert len(collect(collector(policy), policy, true_actions)) >= ENOUGH


def test_with_whole_trajectories(collector):
    policy = Tagged(pause=0.001)
    collecting = collector(policy, trajs_per_batch=4)

    def check(batch):
        return true(batch[batch["collector", "mask"]])

    assert len(collect(collecting, policy, check)) >= ENOUGH


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_running_free_into_a_replay_buffer(collector, kind):
    policy = Tagged(pause=0.001)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), shared=True, batch_size=1)
    sample = next(iter(collector(Tagged()))).reshape(-1)
    buffer.extend(sample)  # otherwise TorchRL lays it out without the version
    collecting = collector(policy, kind=kind, replay_buffer=buffer)
    collecting.start()
    with training(collecting, policy) as trainer:
        while trainer.error is None and (buffer.write_count < 400 or trainer.sent < ENOUGH):
            trainer.stop.wait(0.05)
    collecting.async_shutdown()
    frames = buffer[len(sample) : len(buffer)]
    assert len(frames) >= 300
    assert len(true(frames)) >= 5


def test_while_workers_part_and_meet_again(collector):
    """Each worker's weights are the number of updates that it got."""
    collecting = collector(Tagged(pause=0.001), kind=MultiAsyncCollector)
    counts = [0, 0]

    def update(number):
        chosen = [(0,), (1,), (0, 1)][number % 3]
        for worker in chosen:
            counts[worker] += 1
        collecting.update_policy_weights_({worker: Tagged(counts[worker]) for worker in chosen})

    assert len(collect(collecting, None, update=update)) >= ENOUGH


@pytest.mark.parametrize(("kind", "slots"), BOTH)
def test_while_extra_state_grows_and_workers_move_with_it(collector, kind, slots):
    policy = policies.Acting(policies.Remembering())
    collecting = collector(policy, kind=kind, scheme=ShmWeightSyncScheme(slots=slots))

    def update(number):
        policy.module.write("x" * (1 << min(number, 18)))
        collecting.update_policy_weights_()

    assert len(collect(collecting, policy, true_actions, update=update)) >= ENOUGH


def test_while_another_model_is_updated_as_often(collector):
    policy, critic = Tagged(pause=0.001), environments.Critic()
    schemes = {"policy": ShmWeightSyncScheme(), "env.critic": parts.scheme_of(critic, "env.critic")}
    collecting = collector(policy, schemes=schemes)

    def update(number):
        collecting.update_policy_weights_(environments.Critic(number), model_id="env.critic")
        policy.set(number)
        collecting.update_policy_weights_()

    def check(frames):
        difference = frames["next", "reward"].squeeze(-1).long() - frames["next", "policy_version"]
        assert (difference >= 0).all()  # the critic goes first
        return true(frames)

    assert len(collect(collecting, policy, check, update=update)) >= ENOUGH


def test_versions_go_on_when_workers_part_and_meet(collector):
    """Each worker counts the updates that it got."""
    policy = Tagged()
    collecting = collector(policy)
    batches = iter(collecting)
    counts = [0, 0]
    for worker_ids in ([0], [0], None, [1], None, [0, 1]):
        collecting.update_policy_weights_(worker_ids=worker_ids)
        for worker in (0, 1) if worker_ids is None else worker_ids:
            counts[worker] += 1
        assert next(batches)["policy_version"].float().mean(1).tolist() == counts
