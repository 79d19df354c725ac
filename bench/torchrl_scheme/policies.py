"""The policies and the environment of the benchmark of the scheme for TorchRL; workers import little else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import models
from tensordict.nn import TensorDictModule
from torch import nn

ECHO = 100_000  # elements


class Screen(nn.Module):
    """Draws the four observations as an image of 3 x 64 x 64, so that vision needs no display."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        image = nn.functional.interpolate(observation.reshape(-1, 1, 2, 2), 64)
        return image.expand(-1, 3, -1, -1)


def chain(layers: int, width: int) -> nn.Module:
    """A layer has two tensors."""
    return nn.Sequential(nn.ConstantPad1d((0, width - 4), 0.0), *(nn.Linear(width, width) for _ in range(layers)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def vision() -> nn.Module:
    convolutions = [nn.Conv2d(3, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(Screen(), *convolutions, nn.Linear(1152, 4200), nn.ReLU(), nn.Linear(4200, 2))


BODIES: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether there is an echo beside it
    "CartPole, 5k parameters": (mlp, False),
    "CartPole, 5k + 100k parameters": (mlp, True),
    "200 tensors, 1.6 MB": (lambda: chain(100, 63), False),
    "vision, 5M parameters": (vision, True),
    "1 tensor": (lambda: nn.Linear(4, 2, bias=False), False),
    "600 tensors": (lambda: chain(300, 4), False),
}


class Net(nn.Module):
    """Acts at random, and shows with every action which weights it used.

    All elements of the echo are the number of their update. `low` is read before the other weights are used and `high`
    after them, so weights that change in between, or are half written, make them differ.
    """

    def __init__(self, body: nn.Module, echo: bool) -> None:
        super().__init__()
        self.body = body
        self.echo = nn.Parameter(torch.zeros(ECHO if echo else 0))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.ones(observation.shape[:-1])
        watched = self.echo.numel() > 0
        low = self.echo.amin() if watched else 0.0
        logits = self.body(observation)[..., :2].reshape(*ones.shape, 2)
        action = torch.distributions.Categorical(logits=logits).sample()
        high = self.echo.amax() if watched else 0.0
        return action, low * ones, high * ones, 0 * ones


class Policy(TensorDictModule):
    """Writes beside each action how long the call took, with every wait in it: for a lock, or for the GIL."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        tensordict = super().__call__(*args, **kwargs)
        return tensordict.set("seconds", torch.full(tensordict.batch_size, time.perf_counter() - start))


def build(name: str) -> Policy:
    body, echo = BODIES[name]
    return Policy(Net(body(), echo), in_keys=["observation"], out_keys=["action", "low", "high", "seconds"])


def make_env() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def digest(state: Mapping[str, torch.Tensor]) -> int:
    """Of every byte of a state_dict."""
    return models.digest([state[name] for name in sorted(state)])
