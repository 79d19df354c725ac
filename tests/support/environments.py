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

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


def cartpole():
    return gymnasium.make("CartPole-v1")


def pendulum():
    return gymnasium.make("Pendulum-v1")


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


class Nested(Counting):
    """A Dict observation and a Box action."""

    observation_space = spaces.Dict({"image": spaces.Box(0, 255, (3, 4), np.uint8), "goal": spaces.Discrete(7)})
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self._observation(), *super().step(action)[1:]

    def _observation(self):
        return {"image": np.full((3, 4), 9, np.uint8), "goal": 3}


class Failing(Counting):
    """Raises, or dies, at a step of an episode; only if `when` says so."""

    def __init__(self, how, at=3, when=lambda: True):
        super().__init__(length=50)
        self._how, self._at, self._when = how, at, when

    def step(self, action):
        if self._steps == self._at and self._when():
            if self._how == "raise":
                raise RuntimeError("the simulator broke")
            if self._how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class FirstTime:
    """True once, in whichever process asks first."""

    def __init__(self, path):
        self._path = path

    def __call__(self):
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Slow(Counting):
    def step(self, action):
        time.sleep(0.005)
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
        ones = torch.ones(len(observation))
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


class BoxPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, observation):
        assert observation["image"].shape[1:] == (3, 4)
        return self.scale * torch.ones(len(observation["goal"]), 2)


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation):
        return self.net(observation)


def flat(batch):
    """Its tensors by dotted name, copied."""
    return batch.clone().flatten_keys(".").to_dict()
