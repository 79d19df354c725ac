"""MultiprocessCollector: what its batches hold, what it takes, and its state."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

import shmsync
from support.environments.basic import Constant, Counting, Odd, Policy, cartpole, differences, flat


def check_rows(rows, length=5):
    """Whether these frames of one Counting follow one another, over the ends of its episodes too."""
    now, after = rows["observation"][:, 0], rows["next", "observation"][:, 0]
    done = rows["next", "done"][:, 0]
    assert torch.equal(now, torch.arange(len(rows)) % length)
    assert torch.equal(after, now + 1)  # where the action led, also at the end of an episode
    assert torch.equal(done, after == length) and torch.equal(done, rows["next", "truncated"][:, 0])
    assert not rows["next", "terminated"].any() and (rows["next", "reward"] == 1).all()
    assert torch.equal(rows["next", "episode_return"][:, 0].nan_to_num(-1), torch.where(done, float(length), -1.0))


class Halves(Constant):
    """A Box action."""

    def forward(self, observation):
        return (self.action + 0.5).expand(len(observation), 2)


@pytest.mark.parametrize("sync", [True, False])
def test_frames_follow_one_another(collector, sync):
    batches = collector([Counting, Counting], Constant(), frames_per_batch=24, sync=sync, total_frames=240)
    seen: dict[int, list[torch.Tensor]] = {}
    frames = 0
    for batch in batches:
        assert batch.batch_size == ((2, 12) if sync else (1, 24))
        frames += batch.numel()
        for row in batch.clone():
            seen.setdefault(int(row["worker"][0]), []).append(row)
    assert frames == 240
    for rows in seen.values():
        check_rows(torch.cat(rows))


def test_the_batch_before_stays_as_it_is_while_the_next_is_collected(collector):
    batches = collector(Counting, Constant())
    first = next(batches)
    copy = flat(first)
    next(batches)
    assert all(torch.equal(value, copy[key]) for key, value in flat(first).items() if key != "next.episode_return")


def test_the_same_seed_gives_the_same_frames(collector):
    def run():
        torch.manual_seed(0)
        policy = Policy()
        batches = collector(policy=policy, seed=5, envs_per_worker=2)
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
        assert differences(one, other) == []


def test_a_tensordict_module_is_a_policy(collector):
    policy = TensorDictModule(Constant(1), in_keys=["observation"], out_keys=["action"])
    batch = next(collector(Counting, policy))
    assert batch["action"].all() and batch["action"].shape == (2, 20)


def test_nested_observations_and_box_actions(collector):
    space = spaces.Dict({"image": spaces.Box(0, 255, (3, 4), np.uint8), "goal": spaces.Discrete(7)})
    value = {"image": np.full((3, 4), 9, np.uint8), "goal": 3}
    env = functools.partial(Odd, space, reset=value, action=spaces.Box(-1.0, 1.0, (2,), np.float32))
    batch = next(collector(env, Halves(), envs_per_worker=2))
    assert batch.batch_size == (4, 10)
    assert torch.equal(batch["observation", "image"], torch.full((4, 10, 3, 4), 9, dtype=torch.uint8))
    assert torch.equal(batch["next", "observation", "goal"], torch.full((4, 10), 3))
    assert torch.equal(batch["action"], torch.full((4, 10, 2), 0.5))


def test_environments_of_different_form_are_refused(collector):
    with pytest.raises(ValueError, match="same spaces"):
        collector([Counting, cartpole], Constant())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames_per_batch": 41}, "use 40"),
        ({"on_lag": "wait"}, "on_lag"),
        ({"env": [Counting]}, "1 functions for 2 workers"),
    ],
)
def test_arguments_are_refused_before_anything_starts(collector, options, message):
    with pytest.raises(ValueError, match=message):
        collector(**options)


def test_a_loaded_state_continues_the_counts_and_the_policy(collector):
    first = collector(policy=Policy())
    next(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = collector(policy=Policy())
    other.load_state_dict(state)
    assert other.stats().frames == 40 and other.stats().version == 2
    assert torch.equal(other.policy.net.weight, state["policy"]["net.weight"])
    assert (next(other)["policy_version"] == 2).all()


def test_a_state_of_another_policy_is_refused(collector):
    batches = collector(policy=Policy())
    state = batches.state_dict()
    state["policy"].pop("net.weight")
    with pytest.raises(shmsync.ManifestMismatch, match=r"missing: net\.weight"):
        batches.load_state_dict(state)
