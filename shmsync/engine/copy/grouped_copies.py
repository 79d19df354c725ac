"""Which tensors on devices torch copies into a slot by one call, and which it copies alone."""

from __future__ import annotations

import torch

from ...memory.manifest import Leaf

LARGE = 32 << 20  # bytes of a leaf that a device copies faster alone: an H100 by a tenth

# What torch._foreach_copy_() copies by one kernel for many tensors. It has none for other dtypes.
_KERNELS = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class GroupedCopies:
    """Copies of tensors on devices into a slot: work of the current streams, and few calls.

    A call has tensors of one device, one dtype on each side, and equal strides. For others torch copies one after the
    other, and before 2.11 it took the dtype of the first target for all of them. LARGE ones are copied alone.

    Args:
        sources: tensors and leaves, of which those at these `places` lie on devices.
        device: where the slot lies.
    """

    def __init__(self, sources: list[tuple[torch.Tensor, Leaf]], places: list[int], device: torch.device) -> None:
        self._alone: list[int] = []
        groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for place in places:
            source, leaf = sources[place]
            kinds = leaf.dtype, source.dtype
            alike = source.device == device and source.stride() == leaf.strides and _KERNELS.issuperset(kinds)
            if alike and leaf.nbytes < LARGE:
                groups.setdefault(kinds, []).append(place)
            else:
                self._alone.append(place)
        self._groups = list(groups.values())

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy sources like those into targets, which stand at the same places."""
        for place in self._alone:
            targets[place].copy_(sources[place])
        for group in self._groups:
            torch._foreach_copy_([targets[place] for place in group], [sources[place] for place in group])
