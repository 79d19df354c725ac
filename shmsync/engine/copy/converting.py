"""Leaves that cannot be copied as plain bytes of the host: cast, in another memory layout, or on a device.

Into a slot in the host's memory they are converted directly, one leaf after the other, so that publishing needs no
second copy of the weights: at most one leaf is in temporary memory. With slots = 1 readers wait while the slot is
written; there a small set is converted beforehand into private memory, and they wait for a copy of its bytes alone.

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
from .grouped_copies import GroupedCopies

STAGED_BYTES = 16 << 20  # the most that is converted beforehand: the price of shorter waits, for small weights only


class Conversions:
    """The converted leaves of one plan. With slots = 1 and at most STAGED_BYTES of them, they are staged.

    Args:
        arena: whose slots are written.
        sources: tensors that were checked, and their leaves.

    Attributes:
        none: there is no such leaf, and every later call is a no-op.
        sources: the tensors that are converted; use() gives them.
        devices: those on which they lie.
        from_host: the leaves that write_aside() writes: they lie in the host's memory, the slot does not.
        written: bytes that write() and write_aside() move.
        staged: the private copies that stage() fills, to be copied as bytes; none if write() converts into the slot.
    """

    def __init__(self, arena: Arena, sources: list[tuple[torch.Tensor, Leaf]]) -> None:
        self._arena = arena
        self.none = not sources
        self.sources = [source for source, _ in sources]
        self._leaves = [leaf for _, leaf in sources]
        self.written = sum(leaf.nbytes for leaf in self._leaves)
        self.staged: list[tuple[torch.Tensor, Leaf]] = []
        self._aside: list[int] = []  # by their places in `sources`
        self._on_device: GroupedCopies | None = None
        if arena.on_device is not None:
            self._aside = [place for place, source in enumerate(self.sources) if source.device.type == "cpu"]
            others = [place for place, source in enumerate(self.sources) if source.device.type != "cpu"]
            self._on_device = GroupedCopies(sources, others, arena.device)
        elif arena.slots == 1 and 0 < self.written <= STAGED_BYTES:
            self.written = 0
            with plainly():
                self.staged = [
                    (torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="cpu"), leaf)
                    for leaf in self._leaves
                ]
        self.from_host = [self._leaves[place] for place in self._aside]
        found = (holding(source) for source in self.sources)
        self.devices: list[Device] = list({device.name: device for device in found if device is not None}.values())
        self.sources = []

    def use(self, tensors: list[torch.Tensor]) -> None:
        """Convert these, which were checked; in the order of the sources. An empty list keeps none alive."""
        self.sources = tensors

    def stage(self) -> None:
        """Convert what is staged; called before readers are kept out."""
        if self.staged:
            with plainly():
                for (copy, _), source in zip(self.staged, self.sources, strict=True):
                    assign(copy, source)

    def write(self, slot: int) -> None:
        """Convert what is not staged into this slot, but for what write_aside() writes."""
        if self.sources and not self.staged:
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
