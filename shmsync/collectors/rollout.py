"""Stepping a worker's environments with the policy, frame by frame, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..memory.arena import nested
from ..memory.manifest import Key
from . import spaces
from .buffers import Buffers, Leaves, frame

OBSERVATION: Key = ("observation",)
# What every frame has besides its observations and what the policy returned.
_RESULTS: dict[Key, tuple[torch.dtype, tuple[int, ...]]] = {
    ("next", "reward"): (torch.float32, (1,)),
    ("next", "terminated"): (torch.bool, (1,)),
    ("next", "truncated"): (torch.bool, (1,)),
    ("next", "done"): (torch.bool, (1,)),
    ("next", "episode_return"): (torch.float32, (1,)),  # of the episode that ends with this frame, else NaN
    ("policy_version",): (torch.int64, ()),
    ("worker",): (torch.int64, ()),
}


class Rollout:
    """The environments of one worker, and the policy that acts in them.

    `version()` says which weights the last call of the policy used.
    """

    def __init__(self, envs: Sequence[Any], policy: nn.Module, version: Callable[[], int], *, worker: int) -> None:
        self.envs = envs
        self._policy = policy
        self._version = version
        self._worker = worker
        space = envs[0].observation_space
        self._to_env = spaces.to_env(envs[0].action_space)
        self._leaves = spaces.leaves(space, OBSERVATION)
        # The observations that the policy sees next, `[n, ...]`, written in place.
        self._current = {
            key: torch.empty((len(envs), *t.shape), dtype=t.dtype, device="cpu") for key, t in self._leaves.items()
        }
        self._arrays = [(key[1:], tensor.numpy()) for key, tensor in self._current.items()]
        self._returns = np.zeros(len(envs))
        self._input = self._make_input()
        names = getattr(policy, "out_keys", None)  # of a TensorDictModule
        self._out_keys = names and [(name,) if isinstance(name, str) else tuple(name) for name in names]

    def _make_input(self) -> Any:
        """A TensorDict for policies that take one, else the observation itself."""
        if hasattr(self._policy, "in_keys"):
            made = nested(self._current)
            made.batch_size = torch.Size([len(self.envs)])
            return made
        if len(self._current) == 1 and OBSERVATION in self._current:
            return self._current[OBSERVATION]
        made = nested(self._current)[OBSERVATION[0]]
        made.batch_size = torch.Size([len(self.envs)])
        return made

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for i, env in enumerate(self.envs):
            observation, _ = env.reset(seed=None if seed is None else seed + i)
            self._show(i, observation)
        self._returns[:] = 0.0

    def layout(self) -> Leaves:
        """The leaves of one frame; calls the policy once, on the observations that are there."""
        state = torch.get_rng_state()
        out = self._act()
        torch.set_rng_state(state)
        for action in self._to_env(out[("action",)]):
            if not self.envs[0].action_space.contains(action):
                raise ValueError(f"the policy gave the action {action!r}, which is not in {self.envs[0].action_space}")
        leaves = frame(self._leaves) | frame({key: value[0] for key, value in out.items()})
        leaves |= {("next", *key): value for key, value in frame(self._leaves).items()}
        return leaves | _RESULTS

    def use(self, buffers: Buffers, rows: slice) -> None:
        """Write into these rows of the buffers from now on."""
        ours = [*_RESULTS, *self._leaves, *(("next", *key) for key in self._leaves)]
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
            (path, now, arrays[OBSERVATION + path], arrays[("next", *OBSERVATION, *path)]) for path, now in self._arrays
        ]
        versions = arrays[("policy_version",)]
        for t in range(self.steps):
            if not between():
                return False
            out = self._act()
            versions[:, t] = self._version()
            for key, tensor in given.items():
                tensor[:, t] = out[key]
            for _, now, before, _ in observations:
                before[:, t] = now
            actions = self._to_env(out[("action",)])
            for i, env in enumerate(self.envs):
                self._step(i, env, actions[i], t, arrays, observations)
        return True

    def _act(self) -> Mapping[Key, torch.Tensor]:
        with torch.no_grad():
            out = self._policy(self._input)
        if self._out_keys is not None:
            return {key: out.get(key) for key in self._out_keys}
        return spaces.as_mapping(out)

    def _step(
        self, i: int, env: Any, action: Any, t: int, arrays: dict[Key, NDArray[Any]], observations: list[Any]
    ) -> None:
        observation, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        for path, now, _, after in observations:
            now[i] = after[i, t] = spaces.part(observation, path)
        arrays[("next", "reward")][i, t] = reward
        arrays[("next", "terminated")][i, t] = terminated
        arrays[("next", "truncated")][i, t] = truncated
        arrays[("next", "done")][i, t] = done
        self._returns[i] += reward
        arrays[("next", "episode_return")][i, t] = self._returns[i] if done else np.nan
        if done:
            self._returns[i] = 0.0
            self._show(i, env.reset()[0])

    def _show(self, i: int, observation: Any) -> None:
        for path, now in self._arrays:
            now[i] = spaces.part(observation, path)
