"""Leaves that cannot be copied as plain bytes of the host: cast, in another memory layout, or on a device.

Into a slot in the host's memory they are converted directly, one leaf after the other, so that publishing needs no
second copy of the weights: at most one leaf is in temporary memory. With slots = 1 readers wait while the slot is
written; there a small set is converted beforehand into private memory, and they wait for a copy of its bytes alone.

Into an arena on a device they come in two ways. What lies on a device is copied by torch, many leaves in one call. What
lies in the host's memory is converted on its way into the staging memory, so that the device copies no more bytes than
the slot has.
"""

from __future__ import annotations

from typing import Any

import torch

from ...memory.arena import Arena
from ...memory.devices import Device, assign, holding
from ...memory.manifest import Leaf
from ...memory.torch_modes import plainly

STAGED_BYTES = 16 << 20  # the most that is converted beforehand: the price of shorter waits, for small weights only


class Conversions:
    """The converted leaves of one plan. With slots = 1 and at most STAGED_BYTES of them, they are staged.

    Args:
        arena: whose slots are written.
        sources: tensors that were checked, and their leaves.
    """

    def __init__(self, arena: Arena, sources: list[tuple[torch.Tensor, Leaf]]) -> None:
        self._arena = arena
        self.none = not sources  # every later call is then a no-op
        self._sources = sources
        self._leaves = [leaf for _, leaf in sources]
        self._seen = [_signature(source) for source, _ in sources]
        self.written = sum(leaf.nbytes for _, leaf in sources)  # bytes that write() and write_aside() move
        # The private copies that stage() fills, to be copied as bytes; none if write() converts into the slot.
        self.staged: list[tuple[torch.Tensor, Leaf]] = []
        if arena.on_device is None and arena.slots == 1 and 0 < self.written <= STAGED_BYTES:
            self.written = 0
            with plainly():
                self.staged = [
                    (torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="cpu"), leaf)
                    for _, leaf in sources
                ]

    def unchanged(self) -> bool:
        """Is every source where it was when it was checked, with the same shape and dtype?"""
        return all(
            seen is not None and _signature(source) == seen
            for (source, _), seen in zip(self._sources, self._seen, strict=True)
        )

    def use(self, tensors: list[torch.Tensor]) -> None:
        """Convert these instead, which were checked; in the order of the sources. An empty list keeps none alive."""
        self._sources = list(zip(tensors, self._leaves, strict=True)) if tensors else []

    def stage(self) -> None:
        """Convert what is staged; called before readers are kept out."""
        if self.staged:
            with plainly():
                for (copy, _), (source, _) in zip(self.staged, self._sources, strict=True):
                    assign(copy, source)

    def write(self, slot: int) -> None:
        """Convert what is not staged into this slot, but for what write_aside() writes."""
        if self._sources and not self.staged:
            views = self._arena.views(slot, writable=True)
            with plainly():
                if self._arena.on_device is not None:
                    _copy_on_devices(
                        [(views[leaf.key], each) for each, leaf in self._sources if not self._staged(each)]
                    )
                    return
                for source, leaf in self._sources:
                    assign(views[leaf.key], source)

    def from_host(self) -> list[Leaf]:
        """Those that write_aside() writes: they lie in the host's memory, the slot does not."""
        return [leaf for source, leaf in self._sources if self._staged(source)]

    def write_aside(self, staging: torch.Tensor) -> None:
        """Convert those of from_host() into staging memory that is laid out as a slot is."""
        with plainly():
            for source, leaf in self._sources:
                if self._staged(source):
                    room = staging[leaf.offset : leaf.offset + leaf.nbytes]
                    room.view(leaf.dtype).as_strided(leaf.shape, leaf.strides).copy_(source)

    @property
    def devices(self) -> list[Device]:
        """The devices on which sources lie."""
        found = (holding(source) for source, _ in self._sources)
        return list({device.name: device for device in found if device is not None}.values())

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that are converted."""
        return [source for source, _ in self._sources]

    def _staged(self, source: torch.Tensor) -> bool:
        return self._arena.on_device is not None and source.device.type == "cpu"


# What torch._foreach_copy_() copies by one kernel for many tensors. It has none for other dtypes.
_KERNELS = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def _copy_on_devices(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first: work of the current streams, and few calls.

    A call has tensors of one device, one dtype on each side, and equal strides. For others torch copies one after the
    other, and before 2.11 it took the dtype of the first target for all of them.
    """
    together: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for to, source in pairs:
        kinds = to.dtype, source.dtype
        if _KERNELS.issuperset(kinds) and source.device == to.device and source.stride() == to.stride():
            targets, sources = together.setdefault(kinds, ([], []))
            targets.append(to)
            sources.append(source)
        else:
            to.copy_(source)
    for targets, sources in together.values():
        torch._foreach_copy_(targets, sources)


def _signature(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Differs when the tensor shows other memory, or less of it; one that has become a wrapper differs always."""
    try:
        held = tensor.untyped_storage().nbytes()
        return type(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.layout, held
    except (RuntimeError, NotImplementedError):
        return None
