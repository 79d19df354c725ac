"""Pickles that copy: multiprocessing's own would move the trainer's tensors into shared memory."""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import torch
from torch import nn

from ..engine.source.leaf_check import problem_with
from ..memory.devices import laid_out
from ..memory.manifest import Strides, contiguous, layout_of
from ..memory.torch_modes import run_plainly

# Pickles a message without tensors. Equal messages give equal bytes in both processes.
small = functools.partial(pickle.dumps, protocol=5)


@run_plainly
def dumps(message: object) -> bytes:
    """Pickle a message, with the values of its tensors; the tensors stay where they are."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


@run_plainly
def dumps_apart(message: object, least: int) -> tuple[bytes, list[memoryview]]:
    """As dumps(), but tensors of so many bytes lie beside it. These are views of the tensors' own memory."""
    pieces: list[memoryview] = []

    def inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= least:
            pieces.append(raw)
        return raw.nbytes < least

    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5, buffer_callback=inside).dump(message)
    return buffer.getvalue(), pieces


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, nn.Parameter) and _plain(obj):
            strides = layout_of(obj)
            obj = laid_out(obj.detach().cpu(), strides)
            data = obj.as_strided((obj.numel(),), (1,)).view(torch.uint8).numpy() if obj.numel() else b""
            permuted = () if strides == contiguous(obj.shape) else (strides,)
            return _tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape), *permuted)
        return NotImplemented


def _plain(tensor: torch.Tensor) -> bool:
    return problem_with(tensor) is None and not (tensor.is_conj() or tensor.is_neg())


@run_plainly
def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: Strides | None = None) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, contiguous(shape) if strides is None else strides)
