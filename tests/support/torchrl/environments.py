"""Environments of the TorchRL tests; the collectors' workers import them."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase


class Critic(nn.Module):
    """Its one weight is its opinion."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([float(value)]))

    def forward(self):
        return self.value.detach() * 1

    def read(self):
        return float(self.value)


class Steps(EnvBase):
    """Observes the number of steps so far; five are an episode. The reward is the opinion of its critic."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(
            done=Binary(1, dtype=torch.bool, shape=(1,)), terminated=Binary(1, dtype=torch.bool, shape=(1,))
        )
        self.critic = Critic()
        self._steps = 0

    def call(self, function, *args):
        """Run it in this worker."""
        return function(*args)

    def _observed(self, done):
        done = torch.tensor([done])
        return {"observation": torch.tensor([float(self._steps)]), "done": done, "terminated": done.clone()}

    def _reset(self, tensordict=None, **kwargs):
        self._steps = 0
        return TensorDict(self._observed(False), [])

    def _step(self, tensordict):
        self._steps += 1
        return TensorDict({**self._observed(self._steps == 5), "reward": self.critic()}, [])

    def _set_seed(self, seed):
        torch.manual_seed(seed or 0)
