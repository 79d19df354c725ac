"""Leaves that cannot be copied as plain bytes of the host: cast, in another memory layout, or on a device.

Into a slot in the host's memory they are converted directly, one leaf after the other, so that publishing needs no
second copy of the weights: at most one leaf is in temporary memory.

Into an arena on a device they come in two ways. What lies on a device is copied by torch, many leaves in one call. What
lies in the host's memory is converted on its way into the staging memory, so that the device copies no more bytes than
the slot has.
"""

from __future__ import annotations

import torch

from ...memory.arena import Arena
from ...memory.devices import Device, assign, holding
from ...memory.manifest import Leaf
from ...memory.torch_modes import plainly

LARGE = 32 << 20  # bytes of a leaf that a device copies faster alone: an H100 by a tenth

# What torch._foreach_copy_() copies by one kernel for many tensors. It has none for other dtypes.
_KERNELS = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class Conversions:
    """The converted leaves of one plan.

    Args:
        arena: whose slots are written.
        sources: tensors that were checked, and their leaves.

    Attributes:
        none: there is no such leaf, and every later call is a no-op.
        sources: the tensors that are converted; use() gives them.
        devices: those on which they lie.
        from_host: the leaves that write_aside() writes: they lie in the host's memory, the slot does not.
        written: bytes that write() and write_aside() move.
    """

    def __init__(self, arena: Arena, sources: list[tuple[torch.Tensor, Leaf]]) -> None:
        self._arena = arena
        self.none = not sources
        self.sources = [source for source, _ in sources]
        self._leaves = [leaf for _, leaf in sources]
        self.written = sum(leaf.nbytes for leaf in self._leaves)
        self._aside: list[int] = []  # by their places in `sources`
        self._on_device: GroupedCopies | None = None
        if arena.on_device is not None:
            self._aside = [place for place, source in enumerate(self.sources) if source.device.type == "cpu"]
            others = [place for place, source in enumerate(self.sources) if source.device.type != "cpu"]
            self._on_device = GroupedCopies(sources, others, arena.device)
        self.from_host = [self._leaves[place] for place in self._aside]
        found = (holding(source) for source in self.sources)
        self.devices: list[Device] = list({device.name: device for device in found if device is not None}.values())
        self.sources = []

    def use(self, tensors: list[torch.Tensor]) -> None:
        """Convert these, which were checked; in the order of the sources. An empty list keeps none alive."""
        self.sources = tensors

    def write(self, slot: int) -> None:
        """Convert into this slot, but for what write_aside() writes."""
        if self.sources:
            views = self._arena.views(slot, writable=True)
            targets = [views[leaf.key] for leaf in self._leaves]
            with plainly():
                if self._on_device is not None:
                    self._on_device.copy(targets, self.sources)
                    return
                for target, source in zip(targets, self.sources, strict=True):
                    assign(target, source)

    def write_aside(self, staging: torch.Tensor) -> None:
        """Convert those of `from_host` into staging memory that is laid out as a slot is."""
        with plainly():
            for place, leaf in zip(self._aside, self.from_host, strict=True):
                room = staging[leaf.offset : leaf.offset + leaf.nbytes]
                room.view(leaf.dtype).as_strided(leaf.shape, leaf.strides).copy_(self.sources[place])


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
