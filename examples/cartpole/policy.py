"""The network: what travels from the learner to the actors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

OBSERVATION = 4  # cart position, cart speed, pole angle, pole speed
ACTIONS = 2  # push left, push right


def _mlp(outputs: int, gain: float) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, scale in ((net[0], 2**0.5), (net[2], 2**0.5), (net[4], gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return net


class ActorCritic(nn.Module):
    """Two small networks: `actor` chooses, `critic` judges. 9,155 parameters, 36 KB.

    `forward` is the actor alone, because that is what actor processes call, and because `forward` is what
    `Subscriber.bind` guards. Only the learner calls `value`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actor = _mlp(ACTIONS, gain=0.01)  # near zero: the first policy is close to a coin toss
        self.critic = _mlp(1, gain=1.0)

    def forward(self, observation: Tensor) -> Tensor:
        """Log-probabilities `[..., 2]` of the actions, for observations `[..., 4]`."""
        return torch.log_softmax(self.actor(observation), dim=-1)

    def value(self, observation: Tensor) -> Tensor:
        """Expected discounted return `[...]` from observations `[..., 4]`."""
        return self.critic(observation).squeeze(-1)
