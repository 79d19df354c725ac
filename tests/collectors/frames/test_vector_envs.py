"""Gymnasium's vector environments in a worker: the frames are those that single environments would give."""

from __future__ import annotations

import functools
import os
import signal

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from torch import nn

import shmsync
from support.environments.basic import Constant, Counting, Failing, Policy, differences, flat
from support.processes import alive, until, workers

KINDS = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}


class Episodes(gymnasium.Env):
    """Episodes of 1 to 6 steps that end in either way, or in both; everything comes from the seed and the action."""

    observation_space = spaces.Box(-1e9, 1e9, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, 7))
        return self._observation(0), {"options": str(options)}

    def step(self, action):
        self._left -= 1
        over = self._left == 0
        how = int(self.np_random.integers(1, 4)) if over else 0
        reward = float(self.np_random.normal()) + int(action)
        return self._observation(int(action)), reward, bool(how & 1), bool(how & 2), {"left": self._left}

    def _observation(self, action):
        return np.array([self._left, action, *self.np_random.normal(size=2)], np.float32)


class NestedEpisodes(Episodes):
    """The same with a Dict of Dicts, and Box actions."""

    observation_space = spaces.Dict(
        {
            "state": Episodes.observation_space,
            "inner": spaces.Dict({"image": spaces.Box(0, 255, (3, 4), np.uint8), "goal": spaces.Discrete(7)}),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action):
        return super().step(int(action.sum() > 0))

    def _observation(self, action):
        image = self.np_random.integers(0, 256, (3, 4)).astype(np.uint8)
        return {
            "state": super()._observation(action),
            "inner": {"image": image, "goal": int(self.np_random.integers(7))},
        }


class Vectors:
    """Makes vector environments of this kind and mode."""

    def __init__(self, kind, make, count, mode=AutoresetMode.NEXT_STEP, wrap=None, **options):
        self.kind, self.makes, self.mode = kind, [make] * count if callable(make) else make, mode
        self.wrap, self.options = wrap, options

    def __call__(self):
        made = KINDS[self.kind](self.makes, autoreset_mode=self.mode, **self.options)
        return made if self.wrap is None else self.wrap(made)


class Through(VectorWrapper):
    """Changes nothing, and takes no reset_mask: like a simulator that resets its environments."""

    def reset(self, *, seed=None, options=None):
        assert options is None
        return super().reset(seed=seed)


class Altered(VectorWrapper):
    """Its step() returns what `change` makes of it, from the third one on."""

    def __init__(self, env, change):
        super().__init__(env)
        self._change, self._left = change, 2

    def step(self, actions):
        found = super().step(actions)
        self._left -= 1
        return self._change(*found) if self._left < 0 else found


class Random(nn.Module):
    """Acts at random in NestedEpisodes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, observation):
        state = observation["state"][:, :2] + observation["inner", "goal"][:, None]
        return {"action": torch.rand(len(state), 2) * self.scale - 0.5, "seen": state}


NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ONE = {"num_workers": 1, "frames_per_batch": 40}
CASES = {"flat": (Episodes, Policy), "nested": (NestedEpisodes, Random)}


LENGTHS = [functools.partial(Counting, length) for length in (2, 5, 50)]


def frames(collector, env, policy, **options):
    """Some batches, with other weights for each."""
    torch.manual_seed(0)
    module = policy()
    batches = collector(env, module, frames_per_batch=160, seed=11, **options)
    found = []
    for _ in range(3):
        found.append(flat(next(batches)))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01)
        batches.update_policy_weights_()
    batches.shutdown()
    return found


@pytest.mark.parametrize(
    ("kind", "mode", "case"),
    [
        ("sync", NEXT_STEP, "flat"),
        ("async", SAME_STEP, "nested"),
        ("async", DISABLED, "flat"),
    ],
)
def test_the_frames_are_those_of_single_environments(collector, kind, mode, case):
    make, policy = CASES[case]
    single = frames(collector, make, policy, envs_per_worker=4)
    vector = frames(collector, Vectors(kind, make, 4, mode), policy)
    assert any(each["next.terminated"].any() and each["next.truncated"].any() for each in single)
    for one, other in zip(single, vector, strict=True):
        assert differences(one, other) == []


@pytest.mark.parametrize(
    "env",
    [Vectors("sync", LENGTHS, 3, wrap=Through), Vectors("async", LENGTHS, 3, shared_memory=False)],
    ids=["a wrapper", "async without shared memory"],
)
def test_one_that_resets_in_a_step_of_its_own_leaves_no_such_step_in_the_batch(collector, env):
    batches = collector(env, Constant(), num_workers=1, frames_per_batch=60)
    found = torch.cat([next(batches).clone() for _ in range(4)], 1)
    for row, length in zip(found, (2, 5, 50), strict=True):
        now, after, done = row["observation"][:, 0], row["next", "observation"][:, 0], row["next", "done"][:, 0]
        assert (row["next", "reward"] == 1).all() and torch.equal(after, now + 1)
        assert torch.equal(done, after == length)
        inside = torch.arange(1, len(now)) % 20 != 0  # between two batches steps may have been left out
        assert torch.equal(now[1:][inside], torch.where(done[:-1], 0.0, after[:-1])[inside])


CHANGES = [  # of what its step() returns
    (lambda *found: (*found[:-1], {}), "final_obs"),
    (lambda observation, *rest: (observation[1:], *rest), r"shape \(1, 1\) but .* \(2, 1\)"),
    (lambda observation, reward, *rest: (observation, reward * 1e300, *rest), r"1e\+300.* float32"),
    (lambda *found: found[:4], "a tuple of 4"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_a_vector_environment_returns_is_checked(collector, change, words):
    wrap = functools.partial(Altered, change=change)
    with pytest.raises(shmsync.DataMismatch, match=words):
        next(collector(Vectors("sync", Counting, 2, AutoresetMode.SAME_STEP, wrap=wrap), Constant(), **ONE))


def test_frames_that_do_not_divide_over_the_environments_are_refused(collector):
    before = workers()
    with pytest.raises(ValueError, match=r"frames_per_batch=20 .* 8 environment\(s\).* use 16"):
        collector(Vectors("sync", Counting, 4), Constant(), frames_per_batch=20)
    assert workers() <= before


def test_workers_have_the_same_number_of_environments(collector):
    with pytest.raises(ValueError, match="have 4 and 1 environments"):
        collector([Vectors("sync", Counting, 4), Counting], Constant(), frames_per_batch=40)


def test_the_processes_of_an_async_one_end_with_their_worker_even_if_they_are_stuck(collector):
    env = Vectors("async", functools.partial(Failing, "stay"), 2)
    batches = collector([Vectors("async", Counting, 2), env], Constant())
    batches._begin_round()
    pid = batches._members[1].process.pid
    stuck = [child.pid for child in psutil.Process(pid).children()]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(shmsync.WorkerDied, match="SIGKILL") as caught:
        next(batches)
    assert caught.value.missing == [1]
    assert len(stuck) == 2
    until(lambda: not any(map(alive, stuck)))


def test_a_worker_has_one_vector_environment(collector):
    with pytest.raises(ValueError, match="makes a SyncVectorEnv, and envs_per_worker is for single environments"):
        collector(Vectors("sync", Counting, 2), Constant(), envs_per_worker=2, num_workers=1, frames_per_batch=40)
