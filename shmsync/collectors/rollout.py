"""Stepping a worker's environments with the policy, frame by frame, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..memory.manifest import Key
from . import spaces
from .acting import ACTION, Actor, output
from .buffers import RESULTS, Buffers, Leaves
from .envs import Results, SingleEnvs, VectorEnvs, is_vector, unrolled


class Rows(NamedTuple):
    """The rows of one buffer that a worker writes: arrays `[n, steps, ...]`."""

    before: list[NDArray[Any]]  # for each leaf of the observations
    after: list[NDArray[Any]]  # where each of them led
    reward: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    done: NDArray[Any]
    episode_return: NDArray[Any]
    version: NDArray[Any]


class Rollout:
    """The environments of one worker, and the policy that acts in them.

    `version()` says which weights the last call of the policy used.
    """

    def __init__(
        self, envs: Sequence[Any], policy: nn.Module, version: Callable[[], int], worker: int, device: str | None
    ) -> None:
        self._version = version
        self._worker = worker
        of_vectors = is_vector(envs[0])
        prefix = "single_" if of_vectors else ""
        found = [(getattr(env, f"{prefix}observation_space"), getattr(env, f"{prefix}action_space")) for env in envs]
        spaces.check_alike(found, worker)
        space, action_space = found[0]
        self._to_env = spaces.to_env(action_space)
        singles = unrolled(envs) if of_vectors else list(envs)
        self.count = len(singles) if singles is not None else sum(int(env.num_envs) for env in envs)
        parts = spaces.parts(space, self.count)
        self._new = new = Results(parts, np.zeros(self.count, np.float32), np.ones(self.count, np.bool_), [])
        self._actor = Actor(policy, parts, device)
        self._groups: list[tuple[SingleEnvs | VectorEnvs, slice]] = []
        if singles is not None:
            group = SingleEnvs(singles, new, action_space.dtype if of_vectors else None)
            self._groups.append((group, slice(0, self.count)))
        else:
            first = 0
            for env in envs:
                rows = slice(first, first + int(env.num_envs))
                self._groups.append((VectorEnvs(env, new.of_rows(first, int(env.num_envs))), rows))
                first = rows.stop
        self._uneven = any(group.uneven for group, _ in self._groups)
        self._returns = np.zeros(self.count)  # of the episodes so far

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for group, rows in self._groups:
            group.reset(None if seed is None else seed + rows.start)
        self._returns[:] = 0.0

    def seed_actions(self, seed: int) -> None:
        """Seed the spaces from which environments may draw actions."""
        for group, rows in self._groups:
            group.seed_actions(seed + rows.start)

    def layout(self) -> Leaves:
        """The leaves of one frame; calls the policy once, on the observations that are there."""
        state = torch.get_rng_state()
        out = self._actor.act()
        torch.set_rng_state(state)
        self._to_env(output(out, ACTION))  # refuses what does not fit
        return self._actor.layout(out)

    def use(self, buffers: Buffers, rows: slice) -> None:
        """Write into these rows of the buffers from now on."""
        keys = [part.key for part in self._new.parts]
        ours = {*RESULTS, *keys, *(("next", *key) for key in keys)}
        self._rows: list[Rows] = []
        given: list[dict[Key, torch.Tensor]] = []
        for tensors in buffers.tensors:
            arrays = {key: tensors[key][rows].numpy() for key in ours}
            arrays["worker",][:] = self._worker
            names = ("reward", "terminated", "truncated", "done", "episode_return")
            results = {name: arrays["next", name][..., 0] for name in names}
            after = [arrays[("next", *key)] for key in keys]
            self._rows.append(Rows([arrays[key] for key in keys], after, version=arrays["policy_version",], **results))
            given.append({key: tensors[key][rows] for key in tensors if key not in ours})
        self._actor.use(given)
        self._steps = buffers.spec.steps

    def collect(self, buffer: int, between: Callable[[], bool]) -> bool:
        """Fill the rows of a buffer. `between` is called before each step; False abandons the rest."""
        to, new = self._rows[buffer], self._new
        for array in (to.terminated, to.truncated, to.done):  # so it is in every step that ends no episode
            array.fill(False)
        to.episode_return.fill(np.nan)
        filled = np.zeros(self.count, np.int64)  # steps of each row
        rows: Any = slice(None)  # into which a step is written, and as which step of each
        at: Any = 0
        while (filled < self._steps).any() if self._uneven else at < self._steps:
            if not between():
                return False
            if self._uneven:
                rows = (new.acting & (filled < self._steps)).nonzero()[0]
                at = filled[rows]
            out = self._actor.act()
            actions = self._to_env(output(out, ACTION))
            for group, own in self._groups:
                group.begin(actions[own])
            to.version[rows, at] = self._version()
            self._actor.record(buffer, out, rows, at)
            for part, before in zip(new.parts, to.before, strict=True):
                before[rows, at] = part.now[rows]
            for group, _ in self._groups:
                group.finish()
            for part, after in zip(new.parts, to.after, strict=True):
                after[rows, at] = part.now[rows]
            to.reward[rows, at] = new.reward[rows]
            self._returns += new.reward
            for i, terminated, truncated, leaves in new.ends:
                step = int(filled[i]) if self._uneven else at
                if step < self._steps:
                    for after, led in zip(to.after, leaves, strict=True):
                        after[i, step] = led
                    to.terminated[i, step], to.truncated[i, step], to.done[i, step] = terminated, truncated, True
                    to.episode_return[i, step] = self._returns[i]
                self._returns[i] = 0.0
            new.ends.clear()
            if self._uneven:
                filled[rows] += 1
            else:
                at += 1
        return True
