"""What an environment or a policy gives is recorded as it is, or refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import shmsync
from shmsync.collectors.spaces import one_each, to_env
from support.environments.basic import BYTES, Constant, Counting, Odd, Other, Starting

THREE = spaces.Box(-1e9, 1e9, (3,), np.float32)


class Reusing(Counting):
    """Gives the same array out each time, and writes into it; clears its action too."""

    action_space = spaces.Box(-1e9, 1e9, (1,), np.float32)

    def __init__(self):
        super().__init__()
        self._array = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self._array[:] = super().reset(seed=seed)[0]
        return self._array, {}

    def step(self, action):
        action[:] = -7
        self._array[:], *rest = super().step(action)
        return self._array, *rest


class Scribbling(nn.Module):
    """Returns what it got as its action, and writes into it."""

    def __init__(self, takes_tensordict=False):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))
        if takes_tensordict:
            self.in_keys, self.out_keys = ["observation"], ["action", "observation"]

    def forward(self, given):
        if isinstance(given, torch.Tensor):
            action = given + self.zero
            given.fill_(99.0)
            return action
        given["action"] = given["observation"] + self.zero
        given["observation"] = given["observation"] * 100
        return given


class Always(nn.Module):
    """The same action for every environment."""

    def __init__(self, action, dtype=torch.int64):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))
        self.action, self.dtype = action, dtype

    def forward(self, observation):
        one = torch.tensor(self.action, dtype=self.dtype)
        return one.expand(len(observation), *one.shape)


NESTED = spaces.Dict({"image": BYTES, "inner": spaces.Dict({"goal": spaces.Discrete(7)})})
RIGHT = {"image": np.zeros(3, np.uint8), "inner": {"goal": 3}}
f32 = np.float32
ONE = {"num_workers": 1, "frames_per_batch": 4}


@pytest.mark.parametrize(
    ("value", "words", "call"),
    [
        ({**RIGHT, "inner": {}}, r"lacks inner\.goal", "reset()"),
        (np.zeros(3), r"lacks image", "step()"),
        ({**RIGHT, "image": np.full(3, 300.7)}, r"observation\.image of .*300\.7.* which would be 44", "step()"),
        ({**RIGHT, "image": [1, [2, 3], 4]}, "that is no array", "step()"),
    ],
    ids=["an inner key less", "an array for a dict", "wrong inside", "ragged"],
)
def test_an_observation_that_does_not_fit_is_refused(collector, value, words, call):
    given = {"reset": value} if call == "reset()" else {"reset": RIGHT, "step": value}
    with pytest.raises(shmsync.DataMismatch, match=words) as caught:
        next(collector(functools.partial(Odd, NESTED, **given), Constant(), **ONE))
    assert f"of {call}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward": 1e300}, "the reward of .* float32"),
        ({"reward": np.ones(2)}, r"shape \(2,\), and must be one value"),
        ({"terminated": 0.5}, "terminated of .* 0.5 in float64"),
        ({"result": (np.zeros(3, f32), 1.0, False, {})}, "a tuple of 4"),
    ],
)
def test_a_step_that_returns_something_else_is_refused(collector, given, words):
    env = functools.partial(Odd, THREE, reset=np.zeros(3, f32), **given)
    with pytest.raises(shmsync.DataMismatch, match=words):
        next(collector(env, Constant(), **ONE))


def test_a_reward_may_be_any_one_number(collector):
    for reward in (2, np.float64(2), np.array([2.0]), torch.tensor(2.0)):
        assert one_each(reward, 1, f32, "reward") == 2
    env = functools.partial(Odd, THREE, reset=np.zeros(3, f32), reward=True, terminated=np.bool_(True))
    batch = next(collector(env, Constant(), **ONE))
    assert (batch["next", "reward"] == 1).all() and batch["next", "terminated"].all()


@pytest.mark.parametrize("takes_tensordict", [False, True])
def test_the_recorded_observation_is_the_one_that_the_policy_got(collector, takes_tensordict):
    batch = next(
        collector(Reusing, Scribbling(takes_tensordict), num_workers=1, envs_per_worker=2, frames_per_batch=48)
    )
    steps = torch.arange(24.0).remainder(5).expand(2, 24)
    assert torch.equal(batch["observation"][..., 0], steps)
    assert torch.equal(batch["action"][..., 0], steps)  # what it saw, also after it and the environment wrote into it
    assert torch.equal(batch["next", "observation"][..., 0], steps + 1)


@pytest.mark.parametrize(
    ("out", "error", "words", "after"),
    [
        ({"x": torch.zeros(3, 2)}, shmsync.DataMismatch, "'x'", 0),
        ({"x": torch.zeros(3, 2)}, shmsync.DataMismatch, "'x'", 3),
        ({"x": 3.0}, TypeError, "'x' as float", 3),
        ({"action": torch.zeros(2)}, shmsync.DataMismatch, "first was", 3),
        ({"action": torch.full((2,), 9)}, shmsync.DataMismatch, "not all in Discrete", 3),
    ],
)
def test_a_policy_that_returns_another_form_is_refused(collector, out, error, words, after):
    with pytest.raises(error, match=words):
        next(collector(Counting, Other(out, after), num_workers=1, envs_per_worker=2, frames_per_batch=20))


def test_a_policy_cannot_take_a_key_of_the_collector(collector):
    with pytest.raises(shmsync.DataMismatch, match="'worker', which is the collector's own"):
        collector(Counting, Other({"worker": torch.zeros(1)}), **ONE)


D, M = spaces.Discrete, spaces.MultiDiscrete


@pytest.mark.parametrize(
    ("space", "action"),
    [(D(3), 2), (D(3, start=5), 7), (M([3, 4], start=[1, 0]), [3, 3]), (spaces.MultiBinary(3), [1, 0, 1])],
)
def test_an_action_is_a_value_of_its_space(collector, space, action):
    batch = next(collector(functools.partial(Starting, space), Always(action), **ONE))
    assert batch["next", "reward"].flatten().tolist() == [np.sum(action)] * 4
    assert batch["action"][0, 0].tolist() == action


@pytest.mark.parametrize(
    ("space", "action", "words"),
    [
        (D(3, start=5), 2, "not all in"),
        (D(3), [0, 0, 1], r"needs \[environments\], for example logits\.argmax"),
        (M([3, 4], start=[1, 0]), [0, 0], "not all in"),
        (M([3, 4]), [1.7, 0.0], r"1\.7\d* in float32"),
        (spaces.MultiBinary(3), [2, 0, 1], "not all in"),
        (spaces.Box(-1, 1, (2,)), [0.5], r"needs \[environments, 2\]"),
    ],
)
def test_what_is_no_value_of_the_space_is_refused(space, action, words):
    with pytest.raises(shmsync.DataMismatch, match=words):
        to_env(space)(torch.tensor([action]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_box_actions_are_passed_as_they_are(collector, dtype):
    env = functools.partial(Starting, spaces.Box(-1, 1, (2,)), check=False)
    batch = next(collector(env, Always([1.5, -4.0], dtype), **ONE))  # a Gaussian policy
    assert batch["next", "reward"].flatten().tolist() == [-2.5] * 4
    assert batch["action"].dtype == dtype
