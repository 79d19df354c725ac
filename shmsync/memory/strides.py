"""In which order the values of a tensor lie in memory: strides that are dense, as every leaf has them.

Dense strides are those of a contiguous tensor whose dimensions were permuted: channels_last, transposed. A tensor with
gaps, or with several elements in one place, has none; its leaf is laid out as its clone() would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Strides = tuple[int, ...]

# Elements of any dtype: a stride of so many bytes is still a number. That of a dimension of size 1 may be any.
_FARTHEST = 2**63 // 16


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def layout_of(tensor: torch.Tensor) -> Strides:
    """The strides of the tensor's clone(), as torch itself chooses them; an empty tensor has those of contiguous().

    Those of dimensions of size 1 are kept too: they lead nowhere, but kernels choose their memory format by them.
    """
    strides, rows = tensor.stride(), contiguous(tensor.shape)
    if strides == rows or not tensor.numel():
        return rows
    if not tensor.is_contiguous():
        import torch  # here, since the command line reads strides without it

        from .torch_modes import plainly

        with plainly():
            strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    return strides if max(strides) < _FARTHEST else rows


def same_order(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Have tensors of this shape with these strides their values at the same places?"""
    return first == second or all(a == b or size == 1 for size, a, b in zip(shape, first, second, strict=True))


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Do these strides lead to each element of this shape by one way, and to nothing else? Both are numbers from 0."""
    if len(shape) != len(strides) or 0 in shape:
        return False
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride >= _FARTHEST or (size > 1 and stride != expected):
            return False
        expected *= size
    return True
