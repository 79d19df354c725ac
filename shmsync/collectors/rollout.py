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
from .envs import End, Results, SingleEnvs, VectorEnvs, is_vector, unrolled


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
        self._new = new = Results.of(spaces.parts(space, self.count))
        self._actor = Actor(policy, new.parts, device)
        self._groups: list[tuple[SingleEnvs | VectorEnvs, slice]] = []
        if singles is not None:
            group = SingleEnvs(singles, new, action_space.dtype if of_vectors else None)
            self._groups.append((group, slice(0, self.count)))
        else:
            first = 0
            for env in envs:
                count = int(env.num_envs)
                self._groups.append((VectorEnvs(env, new.of_rows(first, count)), slice(first, first + count)))
                first += count
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
        filled = np.zeros(self.count, np.int64)  # steps of each row; where environments are even, `step` is that of all
        step = 0
        while (filled < self._steps).any() if self._uneven else step < self._steps:
            if not between():
                return False
            # Which rows the step is written into, and as which step of each.
            rows: Any = slice(None)
            at: Any = step
            acting = None
            if self._uneven:
                rows = (filled < self._steps).nonzero()[0]
                at = filled[rows]
                acting = new.acting.copy()
            out = self._actor.act()
            actions = self._to_env(output(out, ACTION))
            for group, own in self._groups:
                group.begin(actions[own])
            to.version[rows, at] = self._version()
            self._actor.record(buffer, out, rows, at)
            for part, before in zip(new.parts, to.before, strict=True):
                before[rows, at] = part.now if acting is None else part.now[rows]
            for group, _ in self._groups:
                group.finish()
            for part, after in zip(new.parts, to.after, strict=True):
                after[rows, at] = part.now if acting is None else part.now[rows]
            to.reward[rows, at] = new.reward if acting is None else new.reward[rows]
            self._returns += new.reward if acting is None else np.where(acting, new.reward, 0.0)
            for end in new.ends:
                if acting is None or acting[end.row]:
                    self._record_end(to, end, step if acting is None else int(filled[end.row]))
            new.ends.clear()
            step += 1
            if acting is not None:
                filled += acting & (filled < self._steps)  # what a reset has written is written over
        return True

    def _record_end(self, to: Rows, end: End, at: int) -> None:
        i = end.row
        if at < self._steps:
            for after, led in zip(to.after, end.leaves, strict=True):
                after[i, at] = led
            to.terminated[i, at], to.truncated[i, at], to.done[i, at] = end.terminated, end.truncated, True
            to.episode_return[i, at] = self._returns[i]
        self._returns[i] = 0.0
