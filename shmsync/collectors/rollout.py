"""Stepping a worker's environments with the policy, frame by frame, straight into the shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import DataMismatch
from ..memory.arena import nested
from ..memory.devices import named
from ..memory.manifest import Key
from . import spaces
from .buffers import RESULTS, Buffers, Leaves
from .envs import Results, SingleEnvs, VectorEnvs, is_vector, unrolled

ACTION: Key = ("action",)


class Rollout:
    """The environments of one worker, and the policy that acts in all of them at once.

    Args:
        envs: single environments, or one vector environment.
        version: says which weights the last call of the policy used.
        worker: the worker's index.
        device: where the policy computes; None: in the host's memory.
    """

    def __init__(
        self, envs: Sequence[Any], policy: nn.Module, version: Callable[[], int], worker: int, device: str | None
    ) -> None:
        self._policy, self._version, self._worker = policy, version, worker
        place = None if device is None else named(device)
        self._there = None if place is None else place.torch_device
        vector: Any = envs[0] if is_vector(envs[0]) else None
        if vector is not None and len(envs) > 1:
            raise ValueError(
                f"create_env_fn makes a {type(vector).__name__}, and envs_per_worker is for single environments; give "
                "the vector environment more of its own"
            )
        prefix = "single_" if vector is not None else ""
        self._to_env = spaces.to_env(getattr(envs[0], f"{prefix}action_space"))
        singles = envs if vector is None else unrolled(vector)
        self.count = int(vector.num_envs) if singles is None else len(singles)
        parts = spaces.parts(getattr(envs[0], f"{prefix}observation_space"), self.count)
        self._new = new = Results(parts, np.zeros(self.count, np.float32), np.ones(self.count, np.bool_), [])
        self._takes_tensordict = hasattr(policy, "in_keys")
        names = getattr(policy, "out_keys", None)  # of a TensorDictModule
        self._out_keys = names and [(name,) if isinstance(name, str) else tuple(name) for name in names]
        self._plain = len(parts) == 1 and not parts[0].path and not self._takes_tensordict
        self._seen = {part.key: part.layout for part in parts}
        self._ours: Leaves = self._seen | {("next", *key): value for key, value in self._seen.items()} | RESULTS
        self._envs = VectorEnvs(vector, new) if singles is None else SingleEnvs(singles, new)
        self._returns = np.zeros(self.count)  # of the episodes so far

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment."""
        self._envs.reset(seed)
        self._returns[:] = 0.0

    def layout(self) -> Leaves:
        """The leaves of one frame; calls the policy once, on the observations that are there."""
        state = torch.get_rng_state()
        out = self._act()
        torch.set_rng_state(state)
        self._to_env(_output(out, ACTION))  # refuses what does not fit
        given: Leaves = {}
        for key in out:
            if key in self._seen:
                continue  # the recorded observation is the one that the policy got, whatever it made of it
            if not all(isinstance(name, str) for name in key):
                raise DataMismatch(
                    f"the policy returned the key {key[0] if len(key) == 1 else key!r}, and the keys of a batch are "
                    "words; name it with a string"
                )
            if key in self._ours:
                raise DataMismatch(f"the policy returned {'.'.join(key)!r}, which is the collector's own; rename it")
            value = _output(out, key)
            if value.ndim == 0 or len(value) != self.count:
                raise DataMismatch(
                    f"the policy returned {'.'.join(key)!r} of shape {tuple(value.shape)} for {self.count} "
                    f"environment(s); its first dimension must be {self.count}"
                )
            given[key] = value.dtype, tuple(value.shape[1:])
        return self._ours | given

    def use(self, buffers: Buffers, rows: slice) -> None:
        """Write into these rows of the buffers from now on."""
        self._steps = buffers.steps
        self._arrays: list[dict[Key, Any]] = []  # of each buffer, `[n, steps, ...]`: what the environments give
        self._given: list[list[tuple[Key, torch.Tensor, Any, tuple[int, ...]]]] = []  # and what the policy does
        for tensors in buffers.tensors:
            own = {key: tensor[rows] for key, tensor in tensors.items()}
            self._arrays.append({key: own.pop(key).numpy() for key in self._ours})
            self._arrays[-1]["worker",][:] = self._worker
            self._given.append(
                [(key, tensor, _array(tensor), (self.count, *tensor.shape[2:])) for key, tensor in own.items()]
            )
        self._known = frozenset(own) | frozenset(self._seen)

    def collect(self, buffer: int, between: Callable[[], bool]) -> bool:
        """Fill the rows of a buffer. `between` is called before each step; False abandons the rest."""
        to, new, uneven = self._arrays[buffer], self._new, self._envs.uneven  # arrays `[n, steps, ...]` and `[n, ...]`
        befores, afters = [to[key] for key in self._seen], [to[("next", *key)] for key in self._seen]
        versions, rewards, returns = to["policy_version",], to["next", "reward"], to["next", "episode_return"]
        ends = [to["next", name] for name in ("terminated", "truncated", "done")]
        for array in ends:  # so it is in every step that ends no episode
            array.fill(False)
        returns.fill(np.nan)
        filled = np.zeros(self.count, np.int64)  # steps of each row
        rows: Any = slice(None)  # into which a step is written, and as which step of each
        at: Any = 0
        while (filled < self._steps).any() if uneven else at < self._steps:
            if not between():
                return False
            if uneven:
                rows = (new.acting & (filled < self._steps)).nonzero()[0]
                at = filled[rows]
            out = self._act()
            self._envs.begin(self._to_env(_output(out, ACTION)))
            versions[rows, at] = self._version()
            self._record(buffer, out, rows, at)
            for part, before in zip(new.parts, befores, strict=True):
                before[rows, at] = part.now[rows]
            self._envs.finish()
            for part, after in zip(new.parts, afters, strict=True):
                after[rows, at] = part.now[rows]
            rewards[rows, at, 0] = new.reward[rows]
            self._returns += new.reward
            for i, terminated, truncated, leaves in new.ends:
                step = int(filled[i]) if uneven else at
                if step < self._steps:
                    for after, led in zip(afters, leaves, strict=True):
                        after[i, step] = led
                    for array, value in zip(ends, (terminated, truncated, True), strict=True):
                        array[i, step] = value
                    returns[i, step] = self._returns[i]
                self._returns[i] = 0.0
            new.ends.clear()
            if uneven:
                filled[rows] += 1
            else:
                at += 1
        return True

    def _act(self) -> Mapping[Key, Any]:
        """Call the policy on the newest observations. Returns its outputs by key.

        It gets its own copy, which it may write into and keep: a TensorDict where it takes one, else the observation.
        """
        tensors = {part.key: torch.from_numpy(part.now.copy()) for part in self._new.parts}
        if self._there is not None:
            tensors = {key: tensor.to(self._there) for key, tensor in tensors.items()}
        given: Any
        if self._plain:
            given = tensors[spaces.OBSERVATION]
        else:
            given = nested(tensors) if self._takes_tensordict else nested(tensors)[spaces.OBSERVATION[0]]
            given.batch_size = torch.Size([self.count])
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what torch.no_grad() does, for a tenth of its time
        try:
            out = self._policy(given)
        finally:
            torch._C._set_grad_enabled(recording)
        if isinstance(out, torch.Tensor):
            found: Mapping[Key, Any] = {ACTION: out}
        elif self._out_keys is not None:
            found = {key: out.get(key) for key in self._out_keys}
        else:
            found = _by_key(out)
        if self._there is None:
            return found
        return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in found.items()}

    def _record(self, buffer: int, out: Mapping[Key, Any], rows: Any, steps: Any) -> None:
        """Write what the policy returned for these rows, as these steps."""
        if not self._known.issuperset(out):
            more = next(key for key in out if key not in self._known)
            raise DataMismatch(
                f"the policy returned {'.'.join(map(str, more))!r}, which it did not the first time; it must return "
                "the same keys each time"
            )
        for key, tensor, array, shape in self._given[buffer]:
            value = _output(out, key)
            if value.shape != shape or value.dtype is not tensor.dtype:
                raise DataMismatch(
                    f"the policy returned {'.'.join(key)!r} as {value.dtype} {tuple(value.shape)} but its first "
                    f"was {tensor.dtype} {shape}; it must return the same form each time"
                )
            if value.requires_grad:
                value = value.detach()
            # NumPy is sooner, but has neither other devices nor lazy conjugates.
            if array is not None and type(value) is torch.Tensor and value.is_cpu and not value.is_conj():
                array[rows, steps] = value.resolve_neg().numpy()[rows]
            else:
                tensor[rows, steps] = value[rows]


def _by_key(out: Any) -> Mapping[Any, torch.Tensor]:
    """What a policy returned, by key. Raises TypeError when there is no action in it."""
    items = out.items(True, True) if hasattr(out, "batch_size") else out.items() if isinstance(out, Mapping) else ()
    found = {key if isinstance(key, tuple) else (key,): value for key, value in items}
    if ACTION not in found:
        raise TypeError(
            f"the policy returned a {type(out).__name__} without an action; return the action, or a dict or TensorDict "
            "that has it under 'action'"
        )
    return found


def _output(out: Mapping[Key, Any], key: Key) -> torch.Tensor:
    """What the policy returned under this key. Raises TypeError for what is no tensor, or not there."""
    value = out.get(key)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"the policy returned {'.'.join(map(str, key))!r} as {type(value).__name__}; it must return only "
            "tensors, and the same keys each time"
        )
    return value


def _array(tensor: torch.Tensor) -> NDArray[Any] | None:
    """The tensor for NumPy; None where NumPy does not have its dtype."""
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16
        return None
