"""Stepping single environments, one after the other, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...memory.manifest import Key
from ..env_values import LARGEST_FLOAT32, flag, number
from .observation_buffers import Observations, check_returned, leaf

Leading = Sequence[NDArray[Any]]  # arrays `[n, ...]`, one for each leaf of the observations


class Results(NamedTuple):
    """Where the results of steps are written in one buffer: arrays `[n, steps, ...]`."""

    reward: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    done: NDArray[Any]
    episode_return: NDArray[Any]
    after: list[NDArray[Any]]  # where each leaf of the observations led

    @classmethod
    def of(cls, arrays: dict[Key, NDArray[Any]], observations: Observations, rows: slice) -> Results:
        """Those of some rows of a buffer."""
        names = ("reward", "terminated", "truncated", "done", "episode_return")
        reward, terminated, truncated, done, episode_return = (arrays["next", name][rows, :, 0] for name in names)
        after = [arrays[("next", *part.key)][rows] for part in observations.parts]
        return cls(reward, terminated, truncated, done, episode_return, after)

    def begin(self) -> None:
        """Write what is so in every step that ends no episode."""
        for array in (self.terminated, self.truncated, self.done):
            array.fill(False)
        self.episode_return.fill(np.nan)


class SingleEnvs:
    """Environments that are stepped one by one."""

    def __init__(self, envs: Sequence[Any], observations: Observations, action_dtype: Any = None) -> None:
        self.count = len(envs)
        self._action_dtype = action_dtype  # of elements of an array, where they expect these; None: as they come
        self._envs = envs
        self._observations = observations
        self._returns = [0.0] * len(envs)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for i in range(self.count):
            self._reset_one(i, None if seed is None else seed + i, self._observations.now)
        self._returns = [0.0] * self.count

    def seed_actions(self, seed: int) -> None:
        """Seed the spaces from which an environment may draw actions."""
        for i, env in enumerate(self._envs):
            env.action_space.seed(seed + i)

    def step(self, actions: Any, to: Results, t: int, following: Leading) -> None:
        """Let each of them step, and write the results as step t; reset those whose episodes end.

        What to.begin() wrote is there already. `following`: where the observations that the policy sees next belong.
        """
        if self._action_dtype is not None:
            actions = np.asarray(actions, self._action_dtype)
        for i, env in enumerate(self._envs):
            result = env.step(actions[i])
            if type(result) is not tuple or len(result) != 5:
                check_returned(result, "step()")
            observation, reward, terminated, truncated, _ = result
            # strict= takes time, and these are of one list
            for part, after, now in zip(self._observations.parts, to.after, following):  # noqa: B905
                path = part.path
                value = observation if not path else None
                if not (type(value) is np.ndarray and value.dtype is part.dtype and value.shape == part.shape):
                    value = leaf(observation, part, part.shape, "step()")
                now[i] = after[i, t] = value
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
                self._reset_one(i, None, following)

    def _reset_one(self, i: int, seed: int | None, following: Leading) -> None:
        """Start a new episode in one of them."""
        result = self._envs[i].reset() if seed is None else self._envs[i].reset(seed=seed)
        check_returned(result, "reset()")
        for part, now in zip(self._observations.parts, following, strict=True):
            now[i] = leaf(result[0], part, part.shape, "reset()")
