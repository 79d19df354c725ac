"""Stepping a worker's environments with the policy, frame by frame, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import vector
from numpy.typing import NDArray
from torch import nn

from ...memory.manifest import Key
from .. import spaces
from ..buffers import RESULTS, Buffers, Leaves
from ..options import WorkerSpec
from .acting import ACTION, Actor, output
from .observation_buffers import Observations, check_alike
from .singles import Results, SingleEnvs
from .vectors import VectorGroup, is_vector


class Rollout:
    """The environments of one worker, and the policy that acts in them.

    `version()` says which weights the last call of the policy used.
    """

    def __init__(self, envs: Sequence[Any], policy: nn.Module, version: Callable[[], int], spec: WorkerSpec) -> None:
        self._version = version
        self._worker = worker = spec.index
        of_vectors = is_vector(envs[0])
        prefix = "single_" if of_vectors else ""
        found = [(getattr(env, f"{prefix}observation_space"), getattr(env, f"{prefix}action_space")) for env in envs]
        check_alike(found, worker)
        self._to_env = spaces.to_env(found[0][1])
        singles = _unrolled(envs) if of_vectors else list(envs)
        self.count = len(singles) if singles is not None else sum(int(env.num_envs) for env in envs)
        self._observations = Observations(found[0][0], self.count)
        self._actor = Actor(policy, self._observations, self.count, spec.device)
        self._singles: SingleEnvs | None = None
        self._vectors: list[tuple[VectorGroup, slice]] = []
        if singles is not None:
            self._singles = SingleEnvs(singles, self._observations, found[0][1].dtype if of_vectors else None)
        else:
            first = 0
            for env in envs:
                rows = slice(first, first + int(env.num_envs))
                self._vectors.append((VectorGroup(env, self._observations.of_rows(rows)), rows))
                first = rows.stop
        self._groups: Sequence[tuple[SingleEnvs | VectorGroup, slice]] = self._vectors
        if self._singles is not None:
            self._groups = [(self._singles, slice(0, self.count))]
        self._uneven = any(group.uneven for group, _ in self._vectors)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        for group, rows in self._groups:
            group.reset(None if seed is None else seed + rows.start)

    def seed_actions(self, seed: int) -> None:
        """Seed the spaces from which environments may draw actions."""
        for group, rows in self._groups:
            group.seed_actions(seed + rows.start)

    def layout(self) -> Leaves:
        """The leaves of one frame; calls the policy once, on the observations that are there."""
        state = torch.get_rng_state()
        out = self._actor.act(self._observations.now)
        torch.set_rng_state(state)
        self._to_env(output(out, ACTION))  # refuses what does not fit
        return self._actor.layout(out)

    def use(self, buffers: Buffers, rows: slice) -> None:
        """Write into these rows of the buffers from now on."""
        layout = self._observations.layout
        ours = [*RESULTS, *layout, *(("next", *key) for key in layout)]
        self._written: list[tuple[dict[Key, NDArray[Any]], list[Results]]] = []  # one of the Results for each group
        given = []
        for tensors in buffers.tensors:
            arrays = {key: tensors[key][rows].numpy() for key in ours}
            arrays[("worker",)][:] = self._worker
            self._written.append((arrays, [Results.of(arrays, self._observations, own) for _, own in self._groups]))
            given.append({key: tensors[key][rows] for key in tensors if key not in arrays})
        self._actor.use(given)
        self.steps = buffers.spec.steps

    def collect(self, buffer: int, between: Callable[[], bool]) -> bool:
        """Fill the rows of a buffer. `between` is called before each step; False abandons the rest."""
        if self._singles is not None:
            return self._collect_singles(self._singles, buffer, between)
        return self._collect_vectors(buffer, between)

    def _collect_singles(self, singles: SingleEnvs, buffer: int, between: Callable[[], bool]) -> bool:
        """collect(), where an observation is written where the batch has it, and read by the policy there."""
        arrays, (results,) = self._written[buffer]
        results.begin()
        versions = arrays[("policy_version",)]
        now = self._observations.now
        befores = [arrays[part.key] for part in self._observations.parts]
        for leaf, before in zip(now, befores, strict=True):
            before[:, 0] = leaf
        for t in range(self.steps):
            here = [before[:, t] for before in befores]
            if not between():
                return False
            out, actions = self._act(here)
            self._record(buffer, out, versions, slice(None), t)
            singles.step(actions, results, t, [b[:, t + 1] for b in befores] if t + 1 < self.steps else now)
        return True

    def _collect_vectors(self, buffer: int, between: Callable[[], bool]) -> bool:
        """collect(), for vector environments. Some of an uneven one now and then reset in a step of the others."""
        arrays, of_vectors = self._written[buffer]
        for results in of_vectors:
            results.begin()
        versions = arrays[("policy_version",)]
        seen = [(part.now, arrays[part.key]) for part in self._observations.parts]
        filled = np.zeros(self.count, np.int64)  # steps of each row
        while (unfilled := filled < self.steps).any():
            if not between():
                return False
            rows, steps = self._next_steps(filled, unfilled)
            out, actions = self._act(self._observations.now)
            for group, own in self._vectors:
                group.begin(actions[own])
            self._record(buffer, out, versions, rows, steps)
            for now, before in seen:
                before[rows, steps] = now[rows]
            for (group, own), to in zip(self._vectors, of_vectors, strict=True):
                acting = group.acting.copy() if self._uneven else True
                group.finish(to, *self._next_steps(filled[own], unfilled[own]))
                filled[own] += acting & unfilled[own] if self._uneven else 1  # what a reset has written is written over
        return True

    def _next_steps(self, filled: NDArray[Any], unfilled: NDArray[Any]) -> tuple[Any, Any]:
        """Which rows the next step is written into, and as which step of each. Where all are even, as slices."""
        if not self._uneven:
            return slice(None), int(filled[0])
        rows = unfilled.nonzero()[0]
        return rows, filled[rows]

    def _act(self, now: Sequence[NDArray[Any]]) -> tuple[Mapping[Key, torch.Tensor], Any]:
        """Call the policy on these observations: what it returned, and actions made of it."""
        out = self._actor.act(now)
        return out, self._to_env(output(out, ACTION))

    def _record(self, buffer: int, out: Mapping[Key, torch.Tensor], versions: NDArray[Any], rows: Any, at: Any) -> None:
        """Write what the policy returned for these rows, as these steps."""
        versions[rows, at] = self._version()
        self._actor.record(buffer, out, rows, at)


def _unrolled(envs: Sequence[Any]) -> list[Any] | None:
    """The environments of these SyncVectorEnvs; None if one of them may do more in a step than to step them.

    That is each other class, a derived one too, and an object whose step() or reset() was replaced. A worker steps
    these environments itself, straight into its batches: a SyncVectorEnv puts their results together three times
    before a batch gets them, which takes longer than to step four CartPoles.
    """
    if any(type(env) is not vector.SyncVectorEnv or vars(env).keys() & {"step", "reset"} for env in envs):
        return None
    return [each for env in envs for each in env.envs]
