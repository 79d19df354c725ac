"""A handful of CartPoles that one actor steps together."""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from .policy import OBSERVATION


class Step(NamedTuple):
    """What one step of every environment gave, each array `[environments, ...]`."""

    next_observation: NDArray[np.float32]  # [n, 4] where the action led, before any reset
    reward: NDArray[np.float32]  # [n]
    terminated: NDArray[np.bool_]  # [n] the pole fell or the cart left the track: no future return
    done: NDArray[np.bool_]  # [n] terminated, or cut off at 500 steps


class CartPoles:
    """`n` independent copies of CartPole-v1, reset as soon as their episode ends.

    A batch of environments makes one forward pass choose `n` actions; a single one would spend most of
    its time in the overhead of a tiny forward.
    """

    def __init__(self, n: int, seed: int) -> None:
        self._envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(n)]
        self.observation = np.empty((n, OBSERVATION), np.float32)  # [n, 4] what the policy sees next
        for i, env in enumerate(self._envs):
            self.observation[i], _ = env.reset(seed=seed + i)
        self._running = np.zeros(n)
        self._finished: list[float] = []

    def step(self, action: NDArray[np.int64]) -> Step:
        """Do `action[i]` in environment i, for all of them (`action` is `[n]`)."""
        n = len(self._envs)
        wide, flat = np.empty((n, OBSERVATION), np.float32), np.empty(n, np.float32)
        step = Step(wide, flat, terminated=np.empty(n, bool), done=np.empty(n, bool))
        for i, env in enumerate(self._envs):
            observation, reward, terminated, truncated, _ = env.step(int(action[i]))
            step.next_observation[i], step.reward[i] = observation, reward
            step.terminated[i], step.done[i] = terminated, terminated or truncated
            self._running[i] += float(reward)
            if step.done[i]:
                self._finished.append(float(self._running[i]))
                self._running[i] = 0.0
                observation, _ = env.reset()
            self.observation[i] = observation
        return step

    def take_finished(self) -> list[float]:
        """Returns of the episodes that ended since the last call, oldest first."""
        finished, self._finished = self._finished, []
        return finished
