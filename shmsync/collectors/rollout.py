"""Stepping a worker's environments with the policy, frame by frame, straight into the shared buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import ManifestMismatch, NoSpace
from ..memory.arena import nested
from ..memory.available import available_bytes
from ..memory.manifest import Key
from . import spaces
from .buffers import RESULTS, Buffers, Leaves, frame
from .casting import fit, flag, number

OBSERVATION: Key = ("observation",)


class _Part(NamedTuple):
    """One leaf of the observations."""

    path: Key  # below the observation itself
    now: NDArray[Any]  # what the policy sees next, `[n, ...]`, written in place
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Rollout:
    """The environments of one worker, and the policy that acts in them.

    `version()` says which weights the last call of the policy used.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        policy: nn.Module,
        version: Callable[[], int],
        *,
        worker: int,
        discrete_actions: spaces.DiscreteActions | None = None,
    ) -> None:
        self.envs = envs
        self._policy = policy
        self._version = version
        self._worker = worker
        self._space = envs[0].observation_space
        self._action_space = envs[0].action_space
        self._to_env = spaces.to_env(self._action_space, discrete_actions)
        self._leaves = spaces.leaves(self._space, OBSERVATION)
        self._check_alike()
        _check_room(self._leaves, len(envs))
        self._parts = []
        for key, leaf in self._leaves.items():
            now = torch.empty((len(envs), *leaf.shape), dtype=leaf.dtype, device="cpu").numpy()
            self._parts.append(_Part(key[1:], now, now.dtype, now.shape[1:]))
        self._returns = np.zeros(len(envs))
        self._takes_tensordict = hasattr(policy, "in_keys")
        names = getattr(policy, "out_keys", None)  # of a TensorDictModule
        self._out_keys = names and [(name,) if isinstance(name, str) else tuple(name) for name in names]

    def _check_alike(self) -> None:
        for index, env in enumerate(self.envs):
            others = frame(spaces.leaves(env.observation_space, OBSERVATION))
            if others != frame(self._leaves) or spaces.form(env.action_space) != spaces.form(self._action_space):
                raise ManifestMismatch(
                    f"environments 0 and {index} of worker {self._worker} have different spaces: {self._space} and "
                    f"{env.observation_space}, {self._action_space} and {env.action_space}; all environments of a "
                    "collector need the same spaces"
                )

    def _input(self) -> Any:
        """What the policy is called with: its own copy, which it may write into and keep.

        A TensorDict for policies that take one, else the observation itself.
        """
        tensors = {OBSERVATION + part.path: torch.from_numpy(part.now.copy()) for part in self._parts}
        if len(tensors) == 1 and OBSERVATION in tensors and not self._takes_tensordict:
            return tensors[OBSERVATION]
        made = nested(tensors) if self._takes_tensordict else nested(tensors)[OBSERVATION[0]]
        made.batch_size = torch.Size([len(self.envs)])
        return made

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for i in range(len(self.envs)):
            self._reset_one(i, None if seed is None else seed + i)
        self._returns[:] = 0.0

    def layout(self) -> Leaves:
        """The leaves of one frame; calls the policy once, on the observations that are there."""
        state = torch.get_rng_state()
        out = self._act()
        torch.set_rng_state(state)
        self._to_env(self._output(out, ("action",)))  # refuses what does not fit
        ours = frame(self._leaves)
        ours |= {("next", *key): value for key, value in ours.items()} | RESULTS
        given = {}
        for key in out:
            if key in self._leaves:
                continue  # the recorded observation is the one that the policy got, whatever it made of it
            if key in ours:
                raise ManifestMismatch(
                    f"the policy returned {'.'.join(key)!r}, which is the collector's own; rename it"
                )
            value = self._output(out, key)
            if value.ndim == 0 or len(value) != len(self.envs):
                raise ManifestMismatch(
                    f"the policy returned {'.'.join(key)!r} of shape {tuple(value.shape)} for {len(self.envs)} "
                    f"environment(s); its first dimension must be {len(self.envs)}"
                )
            given[key] = value[0]
        return ours | frame(given)

    def use(self, buffers: Buffers, rows: slice) -> None:
        """Write into these rows of the buffers from now on."""
        ours = [*RESULTS, *self._leaves, *(("next", *key) for key in self._leaves)]
        self._frames: list[tuple[dict[Key, Any], dict[Key, torch.Tensor]]] = []
        for tensors in buffers.tensors:
            arrays = {key: tensors[key][rows].numpy() for key in ours}
            given = {key: tensors[key][rows] for key in tensors if key not in arrays}
            arrays[("worker",)][:] = self._worker
            self._frames.append((arrays, given))
        self.steps = buffers.spec.steps

    def collect(self, buffer: int, between: Callable[[], bool]) -> bool:
        """Fill the rows of a buffer. `between` is called before each step; False abandons the rest."""
        arrays, given = self._frames[buffer]
        observations = [
            (part, arrays[OBSERVATION + part.path], arrays[("next", *OBSERVATION, *part.path)]) for part in self._parts
        ]
        wanted = [(key, tensor, (len(self.envs), *tensor.shape[2:])) for key, tensor in given.items()]
        versions = arrays[("policy_version",)]
        for t in range(self.steps):
            if not between():
                return False
            out = self._act()
            versions[:, t] = self._version()
            for key, tensor, shape in wanted:
                value = self._output(out, key)
                if value.shape != shape or value.dtype != tensor.dtype:
                    raise ManifestMismatch(
                        f"the policy returned {'.'.join(key)!r} as {value.dtype} {tuple(value.shape)} but its first "
                        f"was {tensor.dtype} {shape}; it must return the same form each time"
                    )
                tensor[:, t] = value.detach()
            for part, before, _ in observations:
                before[:, t] = part.now
            actions = self._to_env(out[("action",)])
            for i, env in enumerate(self.envs):
                self._step(i, env, actions[i], t, arrays, observations)
        return True

    def _act(self) -> Mapping[Key, torch.Tensor]:
        with torch.no_grad():
            out = self._policy(self._input())
        if self._out_keys is not None:
            return {key: out.get(key) for key in self._out_keys}
        return spaces.as_mapping(out)

    def _output(self, out: Mapping[Key, Any], key: Key) -> torch.Tensor:
        value = out.get(key)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the policy returned {'.'.join(map(str, key))!r} as {type(value).__name__}; all that it returns must "
                "be tensors, and the same keys each time"
            )
        return value

    def _step(
        self, i: int, env: Any, action: Any, t: int, arrays: dict[Key, NDArray[Any]], observations: list[Any]
    ) -> None:
        result = env.step(action)
        if type(result) is not tuple or len(result) != 5:
            raise self._not_a_tuple(result, "step()", "observation, reward, terminated, truncated, info")
        observation, reward, terminated, truncated, _ = result
        terminated = flag(terminated, "terminated of step()")
        truncated = flag(truncated, "truncated of step()")
        reward = number(reward, "the reward of step()")
        done = terminated or truncated
        for part, _, after in observations:
            part.now[i] = after[i, t] = self._leaf(observation, part, "step()")
        arrays[("next", "reward")][i, t] = reward
        arrays[("next", "terminated")][i, t] = terminated
        arrays[("next", "truncated")][i, t] = truncated
        arrays[("next", "done")][i, t] = done
        self._returns[i] += reward
        arrays[("next", "episode_return")][i, t] = self._returns[i] if done else np.nan
        if done:
            self._returns[i] = 0.0
            self._reset_one(i, None)

    def _reset_one(self, i: int, seed: int | None) -> None:
        result = self.envs[i].reset() if seed is None else self.envs[i].reset(seed=seed)
        if type(result) is not tuple or len(result) != 2:
            raise self._not_a_tuple(result, "reset()", "observation, info")
        observation = result[0]
        extra = spaces.unknown(observation, self._space)
        if extra:
            raise ManifestMismatch(
                f"the observation of reset() has {', '.join(extra)}, which its space does not have: {self._space}; "
                "add them to the space, or leave them out"
            )
        for part in self._parts:
            part.now[i] = self._leaf(observation, part, "reset()")

    def _leaf(self, observation: Any, part: _Part, call: str) -> Any:
        """A leaf of an observation, as it can be written. The words are made only if it cannot."""
        value = observation
        try:
            for name in part.path:
                value = value[name]
        except (KeyError, IndexError, TypeError):
            spaces.part(observation, part.path, f"the observation of {call}")  # says which
            raise
        if type(value) is np.ndarray and value.dtype == part.dtype and value.shape == part.shape:
            return value
        return fit(value, part.dtype, part.shape, f"{'.'.join(OBSERVATION + part.path)} of {call}")

    def _not_a_tuple(self, result: Any, call: str, names: str) -> ManifestMismatch:
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        return ManifestMismatch(f"{call} returned {what}, and must return a tuple: {names}, as Gymnasium's API says")


def _check_room(leaves: Mapping[Key, torch.Tensor], count: int) -> None:
    """Raise NoSpace if not even the current observations have room."""
    needed, available = count * sum(math.prod(t.shape) * t.dtype.itemsize for t in leaves.values()), available_bytes()
    if needed > available:
        raise NoSpace(
            f"{count} observation(s) need {needed:,} bytes but {available:,} are available to this process (machine "
            "and cgroup); use a smaller observation space, or envs_per_worker="
        )
