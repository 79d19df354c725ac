"""Vector environments of the collector's tests, and the single environments that they are compared with."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from torch import nn

from support.environments.basic import Constant, Counting

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


class Halves(Constant):
    """A Box action."""

    def forward(self, observation):
        return (self.action + 0.5).expand(len(observation), 2)


class Called(Counting):
    """Its reward is 1 where its step was called by a vector environment."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        by_vector = sys._getframe(1).f_code.co_filename.endswith("vector_env.py")
        return observation, float(by_vector), *rest


class Derived(SyncVectorEnv):
    """Halves its rewards, so its own step has to be called."""

    def step(self, actions):
        observation, reward, *rest = super().step(actions)
        return observation, reward / 2, *rest


def derived():
    return Derived([Called] * 4)
