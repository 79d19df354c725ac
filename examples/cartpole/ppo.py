"""Proximal policy optimisation (Schulman et al., 2017) on rollouts that may be a little old.

Actors never wait for the learner, so a rollout was made by weights some versions back. Each step carries
the log-probability it had then; `ratio` = new / old probability of the same action corrects for the age,
twice: PPO's clipped surrogate weighs the action itself with it, and the advantage cuts each later step's
share down by min(1, ratio), as V-trace does (Espeholt et al., 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import ActorCritic
from .rollout import Rollout


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters; they reach 500 for every seed we tried, not the fewest steps."""

    learning_rate: float = 1e-3
    epochs: int = 8  # times each rollout is used
    minibatch: int = 256  # steps per optimiser step
    gamma: float = 0.98  # discount per step
    trace: float = 0.9  # lambda of the advantage: 0 = one step, 1 = whole episode
    clip: float = 0.2  # how far `ratio` may move from 1 and still be rewarded
    entropy: float = 0.003
    value: float = 0.5  # weight of the critic's loss
    max_norm: float = 0.5  # of the gradient


def _log_prob(model: ActorCritic, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of `action` and of every action."""
    every = model(observation)
    return every.gather(-1, action.unsqueeze(-1)).squeeze(-1), every


@torch.no_grad()
def advantages(model: ActorCritic, rollout: Rollout, settings: Settings) -> tuple[Tensor, Tensor]:
    """Advantage and value target of each step, both `[T, B]`."""
    value = model.value(rollout.observation)
    following = model.value(rollout.next_observation)
    log_prob, _ = _log_prob(model, rollout.observation, rollout.action)
    weight = (log_prob - rollout.log_prob).exp().clamp(max=1.0)
    # A cut-off episode would have gone on, so its last state still has a value; a fallen pole has none.
    surprise = rollout.reward + settings.gamma * following * ~rollout.terminated - value
    carry = settings.gamma * settings.trace * ~rollout.done
    advantage = torch.empty_like(value)
    later = torch.zeros_like(value[0])  # weight · advantage of the step after
    for t in reversed(range(len(value))):
        advantage[t] = surprise[t] + carry[t] * later
        later = weight[t] * advantage[t]
    return advantage, value + weight * advantage


def losses(model: ActorCritic, rollout: Rollout, settings: Settings) -> Iterator[Tensor]:
    """The loss of one minibatch after the other, each computed with the weights of that moment."""
    advantage, target = advantages(model, rollout, settings)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation = rollout.observation.flatten(0, 1)
    action, old, advantage, target = (x.flatten() for x in (rollout.action, rollout.log_prob, advantage, target))
    for _ in range(settings.epochs):
        for pick in torch.randperm(len(action)).split(settings.minibatch):
            log_prob, every = _log_prob(model, observation[pick], action[pick])
            ratio = (log_prob - old[pick]).exp()
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            gain = torch.minimum(ratio * advantage[pick], clipped * advantage[pick]).mean()
            critic = (model.value(observation[pick]) - target[pick]).square().mean()
            entropy = -(every.exp() * every).sum(-1).mean()
            yield settings.value * critic - gain - settings.entropy * entropy
