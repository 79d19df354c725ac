"""Stepping a worker's environments with the policy, frame by frame, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import ManifestMismatch
from ..memory.manifest import Key
from . import spaces
from .acting import ACTION, Actor, output
from .buffers import RESULTS, Buffers, Leaves
from .observing import Observations, check_alike
from .singles import Results, SingleEnvs
from .vectors import VectorGroup, is_vector


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
        self._version = version
        self._worker = worker
        of_vectors = [is_vector(env) for env in envs]
        if any(of_vectors) and not all(of_vectors):
            raise ManifestMismatch(
                f"worker {worker} has single environments and vector environments; let create_env_fn make one kind"
            )
        self._of_vectors = any(of_vectors)
        prefix = "single_" if self._of_vectors else ""
        found = [(getattr(env, f"{prefix}observation_space"), getattr(env, f"{prefix}action_space")) for env in envs]
        check_alike(found, worker)
        self._to_env = spaces.to_env(found[0][1], discrete_actions)
        self.count = sum(int(env.num_envs) for env in envs) if self._of_vectors else len(envs)
        self._observations = Observations(found[0][0], self.count)
        self._actor = Actor(policy, self._observations, self.count)
        self._singles = None if self._of_vectors else SingleEnvs(envs, self._observations)
        self._vectors: list[tuple[VectorGroup, slice]] = []
        first = 0
        for env in envs if self._of_vectors else ():
            rows = slice(first, first + int(env.num_envs))
            self._vectors.append((VectorGroup(env, self._observations.of_rows(rows)), rows))
            first = rows.stop
        self._uneven = any(group.uneven for group, _ in self._vectors)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        if self._singles is not None:
            self._singles.reset(seed)
        for group, rows in self._vectors:
            group.reset(None if seed is None else seed + rows.start)

    def seed_actions(self, seed: int) -> None:
        """Seed the spaces from which environments may draw actions."""
        if self._singles is not None:
            self._singles.seed_actions(seed)
        for group, rows in self._vectors:
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
        if rows.stop - rows.start != self.count:
            raise ManifestMismatch(
                f"worker {self._worker} has {self.count} environment(s) now but its part of a batch has "
                f"{rows.stop - rows.start}; let create_env_fn make the same number each time"
            )
        layout = self._observations.layout
        ours = [*RESULTS, *layout, *(("next", *key) for key in layout)]
        self._written: list[tuple[dict[Key, NDArray[Any]], Results, list[Results]]] = []
        given = []
        for tensors in buffers.tensors:
            arrays = {key: tensors[key][rows].numpy() for key in ours}
            arrays[("worker",)][:] = self._worker
            results = Results.of(arrays, self._observations)
            self._written.append((arrays, results, [results.of_rows(own) for _, own in self._vectors]))
            given.append({key: tensors[key][rows] for key in tensors if key not in arrays})
        self._actor.use(given)
        self.steps = buffers.spec.steps

    def collect(self, buffer: int, between: Callable[[], bool]) -> bool:
        """Fill the rows of a buffer. `between` is called before each step; False abandons the rest."""
        if self._uneven:
            return self._collect_unevenly(buffer, between)
        arrays, results, of_vectors = self._written[buffer]
        results.begin()
        versions = arrays[("policy_version",)]
        seen = [(part.now, arrays[part.key]) for part in self._observations.parts]
        singles, everyone = self._singles, slice(None)
        for t in range(self.steps):
            if not between():
                return False
            actions = self._act(buffer, versions, seen, everyone, t)
            if singles is not None:
                singles.step(actions, results, t)
            for (group, rows), to in zip(self._vectors, of_vectors, strict=True):
                group.step(actions[rows], to, everyone, t)
        return True

    def _collect_unevenly(self, buffer: int, between: Callable[[], bool]) -> bool:
        """collect(), where some environments now and then reset in a step of the others."""
        arrays, results, of_vectors = self._written[buffer]
        results.begin()
        versions = arrays[("policy_version",)]
        seen = [(part.now, arrays[part.key]) for part in self._observations.parts]
        filled = np.zeros(self.count, np.int64)  # steps of each row
        while (unfilled := filled < self.steps).any():
            if not between():
                return False
            rows = unfilled.nonzero()[0]
            actions = self._act(buffer, versions, seen, rows, filled[rows])
            for (group, own), to in zip(self._vectors, of_vectors, strict=True):
                acting = group.acting.copy()
                inner = unfilled[own].nonzero()[0]
                group.step(actions[own], to, inner, filled[own][inner])
                filled[own] += acting & unfilled[own]  # what a reset has written is written over
        return True

    def _act(
        self, buffer: int, versions: NDArray[Any], seen: list[tuple[NDArray[Any], NDArray[Any]]], rows: Any, steps: Any
    ) -> Any:
        """Call the policy, record what it saw and returned, and make actions of it."""
        out = self._actor.act()
        versions[rows, steps] = self._version()
        self._actor.record(buffer, out, rows, steps)
        for now, before in seen:
            before[rows, steps] = now[rows]
        return self._to_env(out[ACTION])
