"""Vector environments of Gymnasium's that show who has stepped their environments, and with what."""

from __future__ import annotations

import sys

import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from support.environments.basic import Counting


class Called(Counting):
    """Its reward is 1 where its step was called by a vector environment, and its next observation tells the action's
    type."""

    def __init__(self, action_space=None, length=5):
        super().__init__(length)
        self.action_space = Counting.action_space if action_space is None else action_space

    def step(self, action):
        _, _, *rest = super().step(action)
        name = sys._getframe(1).f_code.co_filename
        reward = 1.0 if name.endswith("vector_env.py") else 0.0
        number = sum(map(ord, f"{type(action).__name__} {getattr(action, 'dtype', '')} {getattr(action, 'shape', '')}"))
        return np.full(1, number, np.float32), reward, *rest


ACTION_SPACES = {
    "discrete": (spaces.Discrete(3), 1, "int64"),
    "several": (spaces.MultiDiscrete([3, 4]), [1, 2], "int64"),
    "bits": (spaces.MultiBinary(3), [1, 0, 1], "int8"),
    "box": (spaces.Box(-1.0, 1.0, (2,), np.float32), [0.5, -0.5], "float32"),
}


class Derived(SyncVectorEnv):
    """Halves its rewards, so its own step has to be asked."""

    def step(self, actions):
        observation, reward, *rest = super().step(actions)
        return observation, reward / 2, *rest


def derived():
    return Derived([Called] * 4)


def patched():
    made = SyncVectorEnv([Called] * 4)
    step = made.step
    made.step = lambda actions: (lambda observation, reward, *rest: (observation, reward / 2, *rest))(*step(actions))
    return made
