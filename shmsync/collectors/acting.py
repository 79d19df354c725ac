"""The policy of a worker: how it gets there, how it is called, and how what it returns is checked and recorded."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from numpy.typing import NDArray
from torch import nn

from ..engine.source.leaf_check import is_a
from ..errors import DataMismatch
from ..memory.arena import nested
from ..memory.devices import named
from ..memory.manifest import Key
from .buffers import RESULTS, Leaves
from .spaces import OBSERVATION, Part

ACTION: Key = ("action",)


def pack(policy: nn.Module, *, values: bool) -> bytes:
    """Pickle the policy for the workers. Without `values`, its parameters are left to shared memory.

    What torch.compile() has wrapped, in the policy or around it, arrives as what it was: compiled code does not travel.
    """
    file = io.BytesIO()
    _PolicyPickler(file, set() if values else {id(parameter) for parameter in policy.parameters()}).dump(policy)
    return file.getvalue()


class _PolicyPickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, left_out: set[int]) -> None:
        super().__init__(file)
        self._left_out = left_out

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._left_out:
            return nn.Parameter, (torch.empty_like(obj, device="meta").detach(), obj.requires_grad)
        if type(obj) in (torch.Tensor, nn.Parameter) and obj.device.type not in ("cpu", "meta"):
            home = obj.detach().cpu()  # a worker may not see the trainer's device
            return (nn.Parameter, (home, obj.requires_grad)) if type(obj) is nn.Parameter else (_itself, (home,))
        if is_a(obj, "torch._dynamo.eval_frame", "OptimizedModule"):
            return _itself, (obj._orig_mod,)
        if isinstance(obj, FunctionType) and hasattr(obj, "_torchdynamo_orig_callable"):
            return _itself, (obj._torchdynamo_orig_callable,)
        return super().reducer_override(obj)


def _itself(value: Any) -> Any:
    return value


def bring(policy: nn.Module, device: str) -> None:
    """Move what the policy has brought along to a device; parameters without values get theirs from shared memory."""
    found = named(device)
    there = torch.device("cpu") if found is None else found.torch_device
    for tensor in (*policy.parameters(), *policy.buffers()):
        if tensor.device.type != "meta" and tensor.device != there:
            moved = tensor.data.to(there)
            try:
                tensor.data = moved
            except RuntimeError:  # torch does so between the host and CUDA, not for every type of device
                is_parameter = isinstance(tensor, nn.Parameter)
                torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)


class Actor:
    """The policy, for so many environments at once. `device`: where it computes; None: in the host's memory."""

    def __init__(self, policy: nn.Module, parts: list[Part], device: str | None = None) -> None:
        place = None if device is None else named(device)
        self._there = None if place is None else place.torch_device
        self._policy = policy
        self._parts = parts
        self._layout = {part.key: part.layout for part in parts}
        self._count = len(parts[0].now)
        self._takes_tensordict = hasattr(policy, "in_keys")
        names = getattr(policy, "out_keys", None)  # of a TensorDictModule
        self._out_keys = names and [(name,) if isinstance(name, str) else tuple(name) for name in names]
        self._plain = len(self._parts) == 1 and not self._parts[0].path and not self._takes_tensordict
        self._wanted: list[list[Any]] = []
        self._known: frozenset[Key] = frozenset()

    def act(self) -> Mapping[Key, torch.Tensor]:
        """Call the policy on the newest observations. Returns its outputs by key.

        It gets its own copy, which it may write into and keep: a TensorDict where it takes one, else the observation.
        """
        tensors = {part.key: torch.from_numpy(part.now.copy()) for part in self._parts}
        if self._there is not None:
            tensors = {key: tensor.to(self._there) for key, tensor in tensors.items()}
        given: Any
        if self._plain:
            given = tensors[OBSERVATION]
        else:
            given = nested(tensors) if self._takes_tensordict else nested(tensors)[OBSERVATION[0]]
            given.batch_size = torch.Size([self._count])
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

    def layout(self, out: Mapping[Key, torch.Tensor]) -> Leaves:
        """The leaves of one frame, with what the policy returned."""
        ours = dict(self._layout)
        ours |= {("next", *key): value for key, value in ours.items()} | RESULTS
        given: Leaves = {}
        for key in out:
            if key in self._layout:
                continue  # the recorded observation is the one that the policy got, whatever it made of it
            if not all(isinstance(name, str) for name in key):
                raise DataMismatch(
                    f"the policy returned the key {key[0] if len(key) == 1 else key!r}, and the keys of a batch are "
                    "words; name it with a string"
                )
            if key in ours:
                raise DataMismatch(f"the policy returned {'.'.join(key)!r}, which is the collector's own; rename it")
            value = output(out, key)
            if value.ndim == 0 or len(value) != self._count:
                raise DataMismatch(
                    f"the policy returned {'.'.join(key)!r} of shape {tuple(value.shape)} for {self._count} "
                    f"environment(s); its first dimension must be {self._count}"
                )
            given[key] = value.dtype, tuple(value.shape[1:])
        return ours | given

    def use(self, given: list[dict[Key, torch.Tensor]]) -> None:
        """Record into these tensors `[n, steps, ...]` from now on: for each buffer, by key."""
        self._wanted = [
            [(key, tensor, _array(tensor), (self._count, *tensor.shape[2:])) for key, tensor in tensors.items()]
            for tensors in given
        ]
        self._known = frozenset(given[0]) | frozenset(self._layout)

    def record(self, buffer: int, out: Mapping[Key, torch.Tensor], rows: Any, steps: Any) -> None:
        """Write what the policy returned for these rows, as these steps."""
        if not self._known.issuperset(out):
            more = next(key for key in out if key not in self._known)
            raise DataMismatch(
                f"the policy returned {'.'.join(map(str, more))!r}, which it did not the first time; it must return "
                "the same keys each time"
            )
        for key, tensor, array, shape in self._wanted[buffer]:
            value = output(out, key).detach()
            if value.shape != shape or value.dtype is not tensor.dtype:
                raise DataMismatch(
                    f"the policy returned {'.'.join(key)!r} as {value.dtype} {tuple(value.shape)} but its first "
                    f"was {tensor.dtype} {shape}; it must return the same form each time"
                )
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


def output(out: Mapping[Key, Any], key: Key) -> torch.Tensor:
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
