"""Leaves that cannot be copied as plain bytes of the host: cast, in another memory layout, or on a device.

Into a slot in the host's memory they are converted directly, one leaf after the other, so that publishing needs no
second copy of the weights: at most one leaf is in temporary memory. Where a device has that slot pinned, it copies
what lies on it by itself, later (Crossing).

Into an arena on a device they come in two ways. What lies on a device is copied by torch, many leaves in one call. What
lies in the host's memory is converted on its way into the staging memory, so that the device copies no more bytes than
the slot has.

To ask a device for thousands of copies takes longer than to make them. So copies between the addresses of the publish
before are recorded, and asked for in one call as long as the addresses stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .. import _native
from ..memory.arena import Arena, view
from ..memory.devices import Device, assign, holding
from ..memory.manifest import TENSOR_ALIGNMENT, Leaf
from ..memory.torch_modes import plainly
from .source.manifest_check import same_layout

LARGE = 32 << 20  # bytes of a leaf that a device copies faster alone: an H100 by a tenth
ALONE = 1 << 20  # bytes of a leaf that crosses the bus alone: at 50 GB/s that takes far longer than to begin
STAGING = 16 << 20  # bytes of the device in which smaller ones are gathered; one leaf may need more
MANY = 32  # leaves whose copies are worth a record

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
        tensors: gives the sources of one publish.
        devices: those on which they lie.
        from_host: the leaves that write_aside() writes: they lie in the host's memory, the slot does not.
        written: bytes that write() and write_aside() move.
    """

    tensors: _native.SourcePlan

    def __init__(self, arena: Arena, sources: list[tuple[torch.Tensor, Leaf]]) -> None:
        self._arena = arena
        self.none = not sources
        self._leaves = [leaf for _, leaf in sources]
        self.written = sum(leaf.nbytes for leaf in self._leaves)
        found = (holding(source) for source, _ in sources)
        self.devices: list[Device] = list({device.name: device for device in found if device is not None}.values())
        here = [place for place, (source, _) in enumerate(sources) if source.device.type == "cpu"]
        self._aside = here if arena.device_slab is not None else []
        self.from_host = [self._leaves[place] for place in self._aside]
        self._there: GroupedCopies | Crossing | None = None  # the copies that a device makes later
        self._here: list[int] = []  # places of the others, among the sources
        if arena.device_slab is not None:
            others = sorted(set(range(len(sources))).difference(here))
            self._there = GroupedCopies(sources, others, arena.torch_device)
        self._recorded: dict[int, Callable[[], None] | None] = {}  # by slot
        self._stay = False  # are the addresses those of the publish before?

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that are converted."""
        return self.tensors.converted

    def found(self, moved: bool) -> None:
        """The sources of another publish were found. `moved`: at other addresses than those of the one before."""
        self._stay = not moved
        if moved:
            self._recorded.clear()

    def write(self, slot: int, *, later: bool = True) -> None:
        """Convert into this slot, but for what write_aside() writes. `later`: a device that has it pinned may do it."""
        if self.none:
            return
        place = self._arena.device_slab or (self._arena.pinned_slab if later else None)
        if place is None or (place.pinned and self.devices != [place.device]):
            with plainly():
                self._convert(slot, range(len(self._leaves)))
            return
        with plainly():
            if self._there is None:
                pairs = list(zip(self.sources, self._leaves, strict=True))
                self._here = [at for at, (source, _) in enumerate(pairs) if source.device != place.device.torch_device]
                self._there = Crossing(pairs, set(range(len(pairs))).difference(self._here), place.device)
            self._convert(slot, self._here)
            again = None
            if self._stay and len(self._leaves) >= MANY and self._there.recordable:
                if slot not in self._recorded:
                    self._recorded[slot] = place.device.record(lambda: self._ask(slot))
                again = self._recorded[slot]
            self._ask(slot) if again is None else again()

    def _convert(self, slot: int, places: Sequence[int]) -> None:
        if places:
            views, sources = self._arena.views(slot, writable=True), self.sources
            for place in places:
                assign(views[self._leaves[place].key], sources[place])

    def _ask(self, slot: int) -> None:
        """Ask the current stream for the copies."""
        if isinstance(self._there, Crossing):
            self._there.to_host(self._arena.slot_address(slot), self.sources)
        elif self._there is not None:
            views = self._arena.views(slot, writable=True)
            self._there.copy([views[leaf.key] for leaf in self._leaves], self.sources)

    def write_aside(self, staging: torch.Tensor) -> None:
        """Convert those of `from_host` into staging memory that is laid out as a slot is."""
        if not self._aside:
            return
        sources = self.sources
        with plainly():
            for place, leaf in zip(self._aside, self.from_host, strict=True):
                room = staging[leaf.offset : leaf.offset + leaf.nbytes]
                room.view(leaf.dtype).as_strided(leaf.shape, leaf.strides).copy_(sources[place])


class GroupedCopies:
    """Copies between tensors on devices and leaves that lie on one: work of the current streams, and few calls.

    A call has tensors of one device, one dtype on each side, and equal strides. For others torch copies one after the
    other, and before 2.11 it took the dtype of the first target for all of them. LARGE ones are copied alone.

    Args:
        tensors: tensors and leaves, of which those at these `places` lie on devices.
        device: where the leaves lie.

    Attributes:
        recordable: all of them lie on that device.
    """

    def __init__(self, tensors: list[tuple[torch.Tensor, Leaf]], places: list[int], device: torch.device) -> None:
        self._alone: list[int] = []
        self.recordable = all(tensors[place][0].device == device for place in places)
        groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for place in places:
            tensor, leaf = tensors[place]
            kinds = leaf.dtype, tensor.dtype
            alike = tensor.device == device and tensor.stride() == leaf.strides and _KERNELS.issuperset(kinds)
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


class Crossing:
    """Copies between tensors on a device and a slot in the host's memory that it has pinned, by its current stream.

    A large leaf crosses as it is. Of small ones each transfer takes a run of neighbours in the slot: they are gathered
    in staging memory of the device, or come from there, by few calls. Staging is used again by the next run, since the
    stream does one after the other.

    Args:
        tensors: tensors and leaves, of which those at these `places` cross.
        device: where the tensors lie.
    """

    recordable = True

    def __init__(self, tensors: list[tuple[torch.Tensor, Leaf]], places: Iterable[int], device: Device) -> None:
        self._device = device
        self._alone: list[int] = []
        self._leaves = [leaf for _, leaf in tensors]
        runs: list[list[int]] = []
        begin = end = -TENSOR_ALIGNMENT
        for place in sorted(places, key=lambda place: self._leaves[place].offset):
            tensor, leaf = tensors[place]
            if leaf.nbytes == 0:
                continue
            if leaf.nbytes >= ALONE and same_layout(tensor, leaf):
                self._alone.append(place)
                continue
            if leaf.offset - end >= TENSOR_ALIGNMENT or leaf.offset + leaf.nbytes - begin > STAGING:
                runs.append([])
                begin = leaf.offset
            runs[-1].append(place)
            end = leaf.offset + leaf.nbytes
        self._runs = [(self._begin(run), self._end(run) - self._begin(run),
                       GroupedCopies(tensors, run, device.torch_device)) for run in runs]  # fmt: skip
        size = max((size for _, size, _ in self._runs), default=0)
        self._staging = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        self._rooms: list[torch.Tensor] = [self._staging] * len(tensors)
        for run in runs:
            for place in run:
                leaf = self._leaves[place]
                self._rooms[place] = view(self._staging.untyped_storage(), leaf, leaf.offset - self._begin(run))

    def _begin(self, run: list[int]) -> int:
        return self._leaves[run[0]].offset

    def _end(self, run: list[int]) -> int:
        return self._leaves[run[-1]].offset + self._leaves[run[-1]].nbytes

    def to_host(self, address: int, sources: list[torch.Tensor]) -> None:
        """Copy tensors like those into the slot at this address."""
        stream, staging = self._device.current(), self._staging.data_ptr()
        for begin, size, gathered in self._runs:
            gathered.copy(self._rooms, sources)
            self._device.copy(stream, [(address + begin, staging, size)])
        leaves = ((sources[place].data_ptr(), self._leaves[place]) for place in self._alone)
        self._device.copy(stream, [(address + leaf.offset, source, leaf.nbytes) for source, leaf in leaves])

    def to_device(self, address: int, views: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Copy the slot at this address, of which these are the views, into tensors like those."""
        stream, staging = self._device.current(), self._staging.data_ptr()
        for begin, size, scattered in self._runs:
            self._device.copy(stream, [(staging, address + begin, size)])
            scattered.copy(targets, self._rooms)
        for place in self._alone:  # by torch: the module may have been converted since
            targets[place].copy_(views[place], non_blocking=True)
