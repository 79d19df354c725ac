"""Stepping one vector environment of Gymnasium's, or of its interface, straight into the shared buffers.

What is recorded is what single environments would give, whenever the vector environment resets:

- SAME_STEP: step() returns the first observation of the next episode; where the old one led is in info["final_obs"].
- DISABLED: the caller says which to reset, with options={"reset_mask": ...}.
- NEXT_STEP: the same for Gymnasium's own. Others reset an environment in the step after its end, whose action and
  reward mean nothing: that step is in no batch. Their neighbours go on meanwhile, and so their rows are full earlier;
  what they do until all rows are full is in no batch either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import vector
from numpy.typing import NDArray

from ...errors import DataMismatch
from ..env_values import flags, numbers
from .observation_buffers import Observations, Part, check_returned, leaf
from .singles import Results

SAME_STEP, NEXT_STEP, DISABLED = "SAME_STEP", "NEXT_STEP", "DISABLED"  # the names of gymnasium.vector.AutoresetMode


def is_vector(env: Any) -> bool:
    """Has it the interface of gymnasium.vector.VectorEnv?"""
    names = ("num_envs", "single_observation_space", "single_action_space")
    return isinstance(env, vector.VectorEnv) or all(hasattr(env, name) for name in names)


class VectorGroup:
    """The environments of one vector environment, which is stepped as one."""

    def __init__(self, env: Any, observations: Observations) -> None:
        self.count = int(env.num_envs)
        self._env = env
        self._observations = observations
        self._action_dtype = env.single_action_space.dtype
        self._returns = np.zeros(self.count)
        self._mode = _mode(env)
        self._masks = self._mode == DISABLED or (self._mode == NEXT_STEP and _takes_masks(env))
        self.uneven = self._mode == NEXT_STEP and not self._masks
        kind = vector.AsyncVectorEnv  # its step() is these two; a class that has changed it is asked for its own
        self._apart = isinstance(env, kind) and type(env).step is kind.step and "step" not in vars(env)
        self.acting = np.ones(self.count, np.bool_)  # which of them take an action in the next step, not a reset

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        self._take_reset(self._env.reset() if seed is None else self._env.reset(seed=seed))
        self._returns[:] = 0.0
        self.acting[:] = True

    def seed_actions(self, seed: int) -> None:
        """Seed the spaces from which an environment of this process may draw actions."""
        self._env.action_space.seed(seed)
        for i, env in enumerate(getattr(self._env, "envs", ())):
            env.action_space.seed(seed + i)

    def begin(self, actions: Any) -> None:
        """Let it step, up to finish(). Environments in processes do so at once, while this one goes on."""
        self._actions = np.asarray(actions, self._action_dtype)
        if self._apart:
            self._env.step_async(self._actions)

    def finish(self, to: Results, rows: Any, steps: Any) -> None:
        """Wait until it has stepped, and write these rows of the result as these steps."""
        result = self._env.step_wait() if self._apart else self._env.step(self._actions)
        if type(result) is not tuple or len(result) != 5:
            check_returned(result, "step()")
        observation, reward, terminated, truncated, info = result
        rewards = numbers(reward, self.count, "the reward of step()")
        terminated = flags(terminated, self.count, "terminated of step()")
        truncated = flags(truncated, self.count, "truncated of step()")
        done = terminated | truncated
        ended = done.any()
        finals = self._finals(info, done) if ended and self._mode == SAME_STEP else []
        for k, (part, after) in enumerate(zip(self._observations.parts, to.after, strict=True)):
            part.now[...] = leaf(observation, part, part.now.shape, "step()")
            led = part.now.copy() if finals else part.now
            for i, final in finals:
                led[i] = final[k]
            after[rows, steps] = led[rows]
        self._returns += np.where(self.acting, rewards, 0.0) if self.uneven else rewards
        to.reward[rows, steps] = rewards[rows]
        to.terminated[rows, steps] = terminated[rows]
        to.truncated[rows, steps] = truncated[rows]
        to.done[rows, steps] = done[rows]
        to.episode_return[rows, steps] = np.where(done, self._returns, np.nan)[rows] if ended else np.nan
        if ended:
            self._returns[done] = 0.0
            if self._masks:
                self._take_reset(self._env.reset(options={"reset_mask": done.copy()}))
        if self.uneven:
            self.acting = ~done

    def _take_reset(self, result: Any) -> None:
        check_returned(result, "reset()")
        for part in self._observations.parts:
            part.now[...] = leaf(result[0], part, part.now.shape, "reset()")

    def _finals(self, info: Any, done: NDArray[np.bool_]) -> list[tuple[int, list[Any]]]:
        """The last observations of the episodes that have ended: (environment, its leaves)."""
        found = info.get("final_obs") if isinstance(info, Mapping) else None
        if found is None:
            raise DataMismatch(
                'step() has ended an episode but its info has no "final_obs", and the environment says that it resets '
                "in the same step (SAME_STEP); let it return them, or use another autoreset_mode"
            )
        return [(int(i), [_final(found, int(i), part) for part in self._observations.parts]) for i in done.nonzero()[0]]


def _final(found: Any, i: int, part: Part) -> Any:
    """A leaf of the last observation of environment i. `found` has one for each environment, or is a batch."""
    call = "step(), in info['final_obs'],"
    if isinstance(found, Mapping):
        for name in part.path:
            found = found[name]
        return leaf(np.asarray(found)[i], part._replace(path=()), part.shape, call)
    return leaf(found[i], part, part.shape, call)


def _mode(env: Any) -> str:
    """When it resets an environment whose episode has ended. NEXT_STEP where it does not say so, as in Gymnasium."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    name = getattr(mode, "name", mode) or NEXT_STEP
    known = (SAME_STEP, NEXT_STEP, DISABLED)
    if name not in known:
        raise DataMismatch(f"{type(env).__name__} has the autoreset_mode {mode!r}, and known are {', '.join(known)}")
    return str(name)


def _takes_masks(env: Any) -> bool:
    """Does reset() reset the environments of its mask at once, although its next step would?"""
    if not hasattr(vector, "AutoresetMode"):  # Gymnasium 1.0
        return False
    if type(env) is vector.AsyncVectorEnv:
        return bool(env.shared_memory) and env.worker is None  # else its processes reset once more in the next step
    return type(env) is vector.SyncVectorEnv
