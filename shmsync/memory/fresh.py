"""New private memory that is laid out as a slot is, and its tensors.

What must be known of each leaf is worked out once for an arena, so that each snapshot only makes the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from .manifest import Key, Manifest, round_up
from .plainly import plainly, plainly_without_bases
from .slab import TENSOR_ALIGNMENT

_strided = torch.as_strided


class Fresh:
    """Makes memory for the leaves of a manifest.

    Args:
        manifest: the leaves. Those that are one tensor in the arena get memory of their own each.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.pieces = [(0, 0, manifest.used_bytes)]  # of a slot, that go there: (to, from, bytes)
        end = round_up(manifest.used_bytes, TENSOR_ALIGNMENT)
        taken: set[int] = set()
        self._leaves: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        self._tree: dict[str, Any] = {}  # of numbers of leaves
        for number, leaf in enumerate(manifest.leaves):
            place = leaf.offset
            if place in taken and leaf.nbytes:
                place = end
                self.pieces.append((place, leaf.offset, leaf.nbytes))
                end = round_up(end + leaf.nbytes, TENSOR_ALIGNMENT)
            elif leaf.nbytes:
                taken.add(place)
            self._leaves.append((leaf.dtype, leaf.shape, contiguous(leaf.shape), place // leaf.dtype.itemsize))
            _put(self._tree, leaf.key, number)
        self._bytes = end
        self._dtypes = {leaf.dtype for leaf in manifest.leaves}

    def make(self) -> tuple[torch.Tensor, TensorDict]:
        """One piece of memory, whose bytes are not set, and the tensors over it."""
        without = plainly_without_bases()
        with without or plainly():
            whole = torch.empty(self._bytes, dtype=torch.uint8, device="cpu")
            typed = {dtype: whole.view(dtype) for dtype in self._dtypes}
            tensors = [_strided(typed[dtype], shape, strides, first) for dtype, shape, strides, first in self._leaves]
            if without is None:
                tensors = [tensor.data for tensor in tensors]
        return whole, _filled(self._tree, tensors)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _put(tree: dict[str, Any], key: Key, number: int) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
    tree[key[-1]] = number


def _filled(tree: dict[str, Any], tensors: list[torch.Tensor]) -> TensorDict:
    return tensordict_of(
        {key: tensors[below] if type(below) is int else _filled(below, tensors) for key, below in tree.items()}
    )


_PLAIN = (torch.Tensor, nn.Parameter, TensorDict)
_NO_BATCH = torch.Size([])
_unsafe: Any = getattr(TensorDict, "_new_unsafe", None)


def tensordict_of(values: dict[str, Any]) -> TensorDict:
    """TensorDict(values, batch_size=[]), whose constructor would take ten times as long to look at each value."""
    if _unsafe is None or not all(type(value) in _PLAIN for value in values.values()):
        return TensorDict(values, batch_size=[])
    made: TensorDict = _unsafe(values, batch_size=_NO_BATCH)
    return made
