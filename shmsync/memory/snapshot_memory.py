"""New private memory for the leaves of an arena, and a TensorDict of it.

Each leaf has its own storage, so that one that is kept, pickled or shared takes no others along. What must be
known of each leaf is worked out once for an arena, so that each snapshot only makes the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .manifest import Manifest, tree
from .torch_modes import plainly

if TYPE_CHECKING:
    from tensordict import TensorDict

Pieces: TypeAlias = list[tuple[int, int, int]]  # (address, place in a slot, bytes)

_empty = torch.empty_strided


class Fresh:
    """Makes memory for the leaves of a manifest.

    Args:
        manifest: the leaves. Those that are one tensor in the arena get memory of their own each.
        device: where the memory lies.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        self._leaves = [(leaf.shape, leaf.strides, leaf.dtype) for leaf in manifest.leaves]
        self._places = [(leaf.offset, leaf.nbytes) for leaf in manifest.leaves]
        self._tree = tree({leaf.key: number for number, leaf in enumerate(manifest.leaves)})

    def make(self) -> tuple[Pieces, list[torch.Tensor]]:
        """What is to be copied where, and for each leaf the tensor there, whose bytes are not set."""
        with plainly():
            device = self._device
            tensors = [_empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._leaves]
            addresses = [tensor.data_ptr() for tensor in tensors]
        pieces = [(to, *place) for to, place in zip(addresses, self._places, strict=True) if place[1]]
        return pieces, tensors

    def weights(self, tensors: list[torch.Tensor]) -> TensorDict:
        """Tensors for each leaf as a TensorDict."""
        from .dotted import dotted

        return dotted(filled(self._tree, tensors))


def filled(tree: dict[str, Any], values: list[Any]) -> TensorDict:
    """A tree of numbers as a TensorDict, with the value of each number in its place."""
    from .dotted import tensordict_of

    return tensordict_of(
        {key: values[below] if type(below) is int else filled(below, values) for key, below in tree.items()}
    )
