"""Bound parameters that go to another process (getattr_policy(), a queue) are sent as copies.

torch would send the descriptor of their memory, and the receiver would fail: it maps for writing what is read-only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn

from ...memory.arena import lies_in_a_slab


@functools.cache
def send_bound_tensors_by_value() -> None:
    """Send bound tensors as copies from this process, from now on."""
    for kind in (torch.Tensor, nn.Parameter):
        ForkingPickler.register(kind, functools.partial(_reduce, ForkingPickler._extra_reducers[kind]))  # type: ignore[attr-defined]


def _reduce(reduce: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
    if lies_in_a_slab(tensor):
        copy = tensor.detach().clone()
        tensor = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    return reduce(tensor)
