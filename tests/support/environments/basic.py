"""Environments and policies of the collector's tests; its workers import them."""

from __future__ import annotations

import os
import signal
import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

BYTES = spaces.Box(0, 255, (3,), np.uint8)
SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


def cartpole():
    return gymnasium.make("CartPole-v1")


class Counting(gymnasium.Env):
    """Its observation is the number of steps so far, and `length` steps are an episode."""

    observation_space = spaces.Box(-1e9, 1e9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=5):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        truncated = self._steps == self._length
        return np.full(1, self._steps, np.float32), 1.0, False, truncated, {}


class Failing(Counting):
    """Dies, or does not return, at the fourth step of an episode."""

    def __init__(self, how):
        super().__init__(length=50)
        self._how = how

    def step(self, action):
        if self._steps == 3:
            if self._how == "exit":
                os._exit(7)
            if self._how == "stay":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Slow(Counting):
    """Takes its time to step."""

    def __init__(self, step=0.005):
        super().__init__()
        self._step = step

    def step(self, action):
        time.sleep(self._step)
        return super().step(action)


class Policy(nn.Module):
    """Acts at random, and says which weights it used: `tag` is set by the trainer before each send."""

    def __init__(self, inputs=4, actions=2):
        super().__init__()
        self.net = nn.Linear(inputs, actions)
        self.register_buffer("tag", torch.zeros(()))
        self.echo = nn.Parameter(torch.zeros(64, 64))  # all its elements are the tag

    def forward(self, observation):
        logits = self.net(observation)
        action = torch.distributions.Categorical(logits=logits).sample()
        low, high = self.echo.min(), self.echo.max()
        ones = torch.ones(len(observation), device=self.tag.device)
        return {"action": action, "tag": self.tag * ones, "low": low * ones, "high": high * ones}

    def set_tag(self, tag):
        with torch.no_grad():
            self.tag.fill_(tag)
            self.echo.fill_(tag)


class Constant(nn.Module):
    """The plainest policy: a module whose output is the action."""

    def __init__(self, action=0):
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation):
        return self.action.long().expand(len(observation))


def flat(batch):
    """Its tensors by dotted name, copied."""
    return batch.clone().flatten_keys(".").to_dict()


def differences(one, other):
    """The names under which two flat() batches have something else; NaN is like NaN."""
    assert one.keys() == other.keys()
    pairs = {name: (one[name].nan_to_num(-9), other[name].nan_to_num(-9)) for name in one}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


class Odd(Counting):
    """Returns the given values from its resets or its steps; its space is `space`."""

    def __init__(self, space, *, reset=None, step=..., reward=1.0, terminated=False, result=None, action=None):
        super().__init__()
        self.observation_space = space
        self.action_space = self.action_space if action is None else action
        self._reset, self._step, self._reward, self._terminated = reset, step, reward, terminated
        self._result = result  # instead of all

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._reset, {}

    def step(self, action):
        if self._result is not None:
            return self._result
        return self._reset if self._step is ... else self._step, self._reward, self._terminated, False, {}


class Starting(Counting):
    """Actions that do not begin at 0. Its reward is the action that it got, summed."""

    def __init__(self, action_space, check=True):
        super().__init__()
        self.action_space, self.check = action_space, check

    def step(self, action):
        assert not self.check or self.action_space.contains(action), action
        observation, _, *rest = super().step(action)
        return observation, float(np.sum(action)), *rest


class Other(nn.Module):
    """Returns something that does not fit, from its n-th call on."""

    def __init__(self, out, after=0):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))
        self.out, self.after, self.calls = out, after, 0

    def forward(self, observation):
        self.calls += 1
        action = torch.zeros(len(observation), dtype=torch.int64)
        return {
            "action": action,
            "x": torch.zeros(len(observation), 2),
            **(self.out if self.calls > self.after else {}),
        }
