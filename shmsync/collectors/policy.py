"""How a policy gets to the workers: pickled, without the values that shared memory has, and to a device there."""

from __future__ import annotations

import io
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch import nn

from ..engine.source.leaf_check import is_a
from ..memory.devices import named


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
