"""What an actor sends: a rollout in shared memory, and a short message that says it is there.

Each actor owns two rollouts: it fills one while the learner reads the other. Nothing here takes a lock,
so an actor that is killed at any moment leaves nothing behind that the learner would wait for: a rollout
that was not announced is never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import shmsync

from .policy import OBSERVATION

STEPS = 32  # T: steps in a rollout
ENVIRONMENTS = 8  # B: environments per actor
BUFFERS = 2  # rollouts per actor; more of them only makes the policy that filled them older


class Rollout(NamedTuple):
    """`T` steps of `B` environments."""

    observation: Tensor  # float32 [T, B, 4]
    next_observation: Tensor  # float32 [T, B, 4] before any reset
    action: Tensor  # int64 [T, B]
    log_prob: Tensor  # float32 [T, B] of the action, under the weights that chose it
    reward: Tensor  # float32 [T, B]
    terminated: Tensor  # bool [T, B]
    done: Tensor  # bool [T, B] terminated or cut off
    version: Tensor  # int64 [T, B] of the weights that chose the action

    @staticmethod
    def shared() -> Rollout:
        """An empty rollout in anonymous shared memory, ready to be handed to an actor process."""
        shape = (STEPS, ENVIRONMENTS)
        floats = [torch.zeros(shape) for _ in range(2)]
        flags = [torch.zeros(shape, dtype=torch.bool) for _ in range(2)]
        integers = [torch.zeros(shape, dtype=torch.int64) for _ in range(2)]
        wide = [torch.zeros(*shape, OBSERVATION) for _ in range(2)]
        rollout = Rollout(*wide, integers[0], *floats, *flags, integers[1])
        for tensor in rollout:
            tensor.share_memory_()
        return rollout

    @staticmethod
    def joined(rollouts: list[Rollout]) -> Rollout:
        """A private copy of several rollouts, side by side: `[T, B₁ + B₂ + …]`."""
        return Rollout(*(torch.cat(parts, dim=1) for parts in zip(*rollouts, strict=True)))


class Message(NamedTuple):
    """Actor to learner, over its pipe: "rollout `buffer` is full", with the actor's counters so far."""

    buffer: int
    returns: list[float]  # of the episodes that ended in it
    stats: shmsync.SubscriberStats
    torn: int  # forward passes on torn weights that were acted upon: only `live` reads may count any
