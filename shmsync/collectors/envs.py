"""The environments of a worker: single ones behind the interface of a vector environment, or a vector environment.

They are stepped as one. Their results lie in arrays of the worker, `[n, ...]`, and are what single
environments would give, whenever a vector environment resets:

- SAME_STEP: step() returns the first observation of the next episode; where the old one led is in info["final_obs"].
- DISABLED: the caller says which to reset, with options={"reset_mask": ...}.
- NEXT_STEP: the same for Gymnasium's own. Others reset an environment in the step after its end, whose action and
  reward mean nothing: that step is in no batch. Their neighbours go on meanwhile, and so their rows are full earlier;
  what they do until all rows are full is in no batch either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import vector
from numpy.typing import NDArray

from ..errors import DataMismatch
from .spaces import Part, leaf, one_each

SAME_STEP, NEXT_STEP, DISABLED = "SAME_STEP", "NEXT_STEP", "DISABLED"  # the names of gymnasium.vector.AutoresetMode
_LARGEST = float(np.finfo(np.float32).max)


class End(NamedTuple):
    """An episode that a step has ended."""

    row: int  # of its environment
    terminated: bool
    truncated: bool
    leaves: list[Any]  # where the step led, by leaf of the observations


class Results(NamedTuple):
    """What the newest step of so many environments gave: arrays `[n, ...]` that are written in place."""

    parts: list[Part]  # the observations that the policy sees next
    reward: NDArray[np.float32]
    acting: NDArray[np.bool_]  # which of them take an action in the next step, not a reset
    ends: list[End]


class SingleEnvs:
    """Environments that are stepped one by one."""

    uneven = False

    def __init__(self, envs: Sequence[Any], results: Results) -> None:
        self._envs = envs
        self._results = results

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for i in range(len(self._envs)):
            self._reset_one(i, None if seed is None else seed + i)

    def begin(self, actions: Any) -> None:
        """These actions are for finish()."""
        self._actions = actions

    def finish(self) -> None:
        """Let each of them step, and reset those whose episodes end."""
        parts, rewards, _, ends = self._results
        for i, (env, action) in enumerate(zip(self._envs, self._actions, strict=True)):
            observation, reward, terminated, truncated, _ = _returned(env.step(action), _STEP)
            # Nearly all values are what they should be: a look at their types is sooner than arrays of one element.
            for part in parts:
                value = observation if not part.path else None
                if not (type(value) is np.ndarray and value.dtype is part.dtype and value.shape == part.shape):
                    value = leaf(observation, part, part.shape, "step()")
                part.now[i] = value
            if not (type(reward) is float and -_LARGEST <= reward <= _LARGEST):
                reward = one_each(reward, 1, np.float32, "the reward of step()")[0]
            rewards[i] = reward
            if terminated is False and truncated is False:
                continue
            terminated = bool(one_each(terminated, 1, np.bool_, "terminated of step()")[0])
            truncated = bool(one_each(truncated, 1, np.bool_, "truncated of step()")[0])
            if terminated or truncated:
                ends.append(End(i, terminated, truncated, [part.now[i].copy() for part in parts]))
                self._reset_one(i, None)

    def _reset_one(self, i: int, seed: int | None) -> None:
        result = self._envs[i].reset() if seed is None else self._envs[i].reset(seed=seed)
        observation, _ = _returned(result, _RESET)
        for part in self._results.parts:
            part.now[i] = leaf(observation, part, part.shape, "reset()")


class VectorEnvs:
    """The environments of one vector environment of Gymnasium's, or of its interface."""

    def __init__(self, env: Any, results: Results) -> None:
        self._env = env
        self._results = results
        self._mode = _mode(env)
        self._masks = self._mode == DISABLED or (self._mode == NEXT_STEP and _takes_masks(env))
        self.uneven = self._mode == NEXT_STEP and not self._masks
        kind = vector.AsyncVectorEnv  # its step() is these two; a class that has changed it is asked for its own
        self._apart = isinstance(env, kind) and type(env).step is kind.step and "step" not in vars(env)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        self._take_reset(self._env.reset() if seed is None else self._env.reset(seed=seed))
        self._results.acting[:] = True

    def begin(self, actions: Any) -> None:
        """Let it step, up to finish(). Environments in processes do so at once, while this one goes on."""
        self._actions = np.asarray(actions, self._env.single_action_space.dtype)
        if self._apart:
            self._env.step_async(self._actions)

    def finish(self) -> None:
        """Wait until it has stepped, and reset those whose episodes have ended, where it takes a mask."""
        result = self._env.step_wait() if self._apart else self._env.step(self._actions)
        observation, reward, terminated, truncated, info = _returned(result, _STEP)
        parts, rewards, acting, ends = self._results
        rewards[:] = one_each(reward, len(rewards), np.float32, "the reward of step()")
        terminated = one_each(terminated, len(rewards), np.bool_, "terminated of step()")
        truncated = one_each(truncated, len(rewards), np.bool_, "truncated of step()")
        done = terminated | truncated
        for part in parts:
            part.now[...] = leaf(observation, part, part.now.shape, "step()")
        if self.uneven:
            rewards[~acting] = 0.0  # of a reset
            done &= acting
            acting[:] = ~done
        if not done.any():
            return
        # Where the ended episodes led is in the info of the step, or in its observation until they are reset.
        for i in done.nonzero()[0].tolist():
            led = [part.now[i].copy() if self._mode != SAME_STEP else _final(info, i, part) for part in parts]
            ends.append(End(i, bool(terminated[i]), bool(truncated[i]), led))
        if self._masks:
            self._take_reset(self._env.reset(options={"reset_mask": done}))

    def _take_reset(self, result: Any) -> None:
        observation, _ = _returned(result, _RESET)
        for part in self._results.parts:
            part.now[...] = leaf(observation, part, part.now.shape, "reset()")


def is_vector(env: Any) -> bool:
    """Has it the interface of gymnasium.vector.VectorEnv?"""
    names = ("num_envs", "single_observation_space", "single_action_space")
    return isinstance(env, vector.VectorEnv) or all(hasattr(env, name) for name in names)


def unrolled(env: Any) -> list[Any] | None:
    """The environments of a SyncVectorEnv; None for one that may do more in a step than to step them.

    That is each other class, a derived one too, and an object whose step() or reset() was replaced. A worker steps
    these environments itself: a SyncVectorEnv puts their results together three times before a batch gets them, which
    takes longer than to step four CartPoles.
    """
    if type(env) is not vector.SyncVectorEnv or vars(env).keys() & {"step", "reset"}:
        return None
    return list(env.envs)


_STEP = "step()", ("observation", "reward", "terminated", "truncated", "info")
_RESET = "reset()", ("observation", "info")


def _returned(result: Any, of: tuple[str, tuple[str, ...]]) -> Any:
    """What a call has returned. Raises DataMismatch unless it is the tuple of Gymnasium's API."""
    call, names = of
    if type(result) is tuple and len(result) == len(names):
        return result
    what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise DataMismatch(f"{call} returned {what}, and must return a tuple: {', '.join(names)}, as Gymnasium's API says")


def _final(info: Any, i: int, part: Part) -> Any:
    """A leaf of the last observation of environment i, of an environment that resets in the same step.

    info["final_obs"] has one for each environment, or is a batch.
    """
    call = "step(), in info['final_obs'],"
    found = info.get("final_obs") if isinstance(info, Mapping) else None
    if found is None:
        raise DataMismatch(
            'step() has ended an episode but its info has no "final_obs", and the environment says that it resets '
            "in the same step (SAME_STEP); let it return them, or use another autoreset_mode"
        )
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
