"""Stepping single environments, one after the other, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..memory.manifest import Key
from .casting import LARGEST_FLOAT32, flag, number
from .observing import Observations, check_reset, check_step, leaf


class Results(NamedTuple):
    """Where the results of steps are written in one buffer: arrays `[n, steps, ...]`."""

    reward: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    done: NDArray[Any]
    episode_return: NDArray[Any]
    after: list[NDArray[Any]]  # where each leaf of the observations led

    @classmethod
    def of(cls, arrays: dict[Key, NDArray[Any]], observations: Observations) -> Results:
        """Those of a buffer."""
        reward, terminated, truncated, done, episode_return = (
            arrays[("next", name)][..., 0] for name in ("reward", "terminated", "truncated", "done", "episode_return")
        )
        after = [arrays[("next", *part.key)] for part in observations.parts]
        return cls(reward, terminated, truncated, done, episode_return, after)

    def of_rows(self, rows: slice) -> Results:
        """Those of some of the environments."""
        return Results(
            self.reward[rows],
            self.terminated[rows],
            self.truncated[rows],
            self.done[rows],
            self.episode_return[rows],
            [array[rows] for array in self.after],
        )

    def begin(self) -> None:
        """Write what is so in every step that ends no episode."""
        for array in (self.terminated, self.truncated, self.done):
            array.fill(False)
        self.episode_return.fill(np.nan)


class SingleEnvs:
    """Environments that are stepped one by one."""

    def __init__(self, envs: Sequence[Any], observations: Observations) -> None:
        self.count = len(envs)
        self._envs = envs
        self._observations = observations
        self._nested = observations.nested
        self._returns = [0.0] * len(envs)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for i in range(self.count):
            self._reset_one(i, None if seed is None else seed + i)
        self._returns = [0.0] * self.count

    def seed_actions(self, seed: int) -> None:
        """Seed the spaces from which an environment may draw actions."""
        for i, env in enumerate(self._envs):
            env.action_space.seed(seed + i)

    def step(self, actions: Any, to: Results, t: int) -> None:
        """Step all of them, and write what comes of it as step t. What to.begin() wrote is there already."""
        parts = self._observations.parts
        for i, env in enumerate(self._envs):
            result = env.step(actions[i])
            if type(result) is not tuple or len(result) != 5:
                check_step(result)
            observation, reward, terminated, truncated, _ = result
            for part, after in zip(parts, to.after):  # noqa: B905  # strict= takes time, and they are of one list
                path = part.path
                value = observation if not path else None
                if not (type(value) is np.ndarray and value.dtype is part.dtype and value.shape == part.shape):
                    value = leaf(observation, part, part.shape, "step()")
                part.now[i] = after[i, t] = value
            if self._nested:
                self._observations.check_keys(observation, "step()")
            if not (type(reward) is float and -LARGEST_FLOAT32 <= reward <= LARGEST_FLOAT32):
                reward = number(reward, "the reward of step()")
            to.reward[i, t] = reward
            self._returns[i] += reward
            if terminated is False and truncated is False:
                continue
            terminated, truncated = flag(terminated, "terminated of step()"), flag(truncated, "truncated of step()")
            if terminated or truncated:
                to.terminated[i, t], to.truncated[i, t], to.done[i, t] = terminated, truncated, True
                to.episode_return[i, t] = self._returns[i]
                self._returns[i] = 0.0
                self._reset_one(i, None)

    def _reset_one(self, i: int, seed: int | None) -> None:
        result = self._envs[i].reset() if seed is None else self._envs[i].reset(seed=seed)
        check_reset(result)
        for part in self._observations.parts:
            part.now[i] = leaf(result[0], part, part.shape, "reset()")
        self._observations.check_keys(result[0], "reset()")
