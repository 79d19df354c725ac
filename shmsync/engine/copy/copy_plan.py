"""One checked source: which of its tensors are copied as bytes, which are converted, and which leaves keep their value.

Making a plan checks all of the source: keys, shapes, dtypes, devices, layouts. That costs more than the copy, so plans
are kept (plan_cache.py). Later uses only check that nothing has changed since (native/bind/sources.hpp), or that
another source is like it (source_signature.py). Autograd's version counters cannot tell what changed: writes through
`.data` or numpy do not move them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ... import _native
from ...errors import ManifestMismatch
from ...memory.arena import Arena, has_address, lies_in
from ...memory.devices import Device, holding
from ...memory.manifest import Key, Leaf, merged
from ..source.leaf_check import extent
from ..source.manifest_check import describe_problems, mismatches, same_bytes, same_layout, untied
from ..source.sources import Collected
from .converting import Conversions
from .source_signature import Seen

_native.set_exchange_table(torch.Tensor)


class CopyPlan:
    """A checked source: which tensors are copied, which through a private copy, and which leaves keep their value."""

    def __init__(
        self,
        collected: Collected,
        arena: Arena,
        name: str,
        *,
        partial: bool,
        any_device: bool,
        seen: Seen | None = None,
    ) -> None:
        problems = mismatches(collected.tensors, arena, partial=partial, any_device=any_device)
        apart = [] if problems else untied(collected.tensors, arena)
        problems += [
            f"{first.name} and {other.name} are one tensor in the arena but have different values in the source"
            for first, other in apart
            if not same_bytes(collected.tensors[first.key], collected.tensors[other.key])
        ]
        if partial and not collected.tensors:
            problems.append("it gives none of the arena's leaves")
        if problems:
            raise ManifestMismatch(describe_problems(problems, f"arena {name!r}", "the weights given to publish()"))
        # Leaf offsets: tied leaves are copied once, by whichever comes first.
        converted: list[tuple[torch.Tensor, Leaf]] = []
        self.in_place: list[Leaf] = []  # the source is the slab itself, at the place where it belongs
        rows: list[tuple[torch.Tensor, int, int]] = []
        row_of: dict[Key, int] = {}
        converted_of: dict[Key, int] = {}
        given: set[int] = set()  # offsets
        ranges = arena.ranges()
        for key, tensor in collected.tensors.items():
            leaf = arena.manifest.by_key[key]
            if leaf.nbytes == 0 or leaf.offset in given:
                continue
            given.add(leaf.offset)
            row_of[key] = len(rows)
            if _own_place(tensor, leaf, ranges, arena.slots, name):
                self.in_place.append(leaf)
                rows.append((tensor, leaf.offset, 0))  # nothing to copy, as long as it stays there
            elif tensor.device.type == "cpu" and same_layout(tensor, leaf) and holding(tensor) is None:
                rows.append((tensor, leaf.offset, leaf.nbytes))
            else:
                converted_of[key] = len(converted)
                del row_of[key]
                converted.append((tensor, leaf))
        self._conversions = Conversions(arena, converted)
        rows += [(copy, leaf.offset, leaf.nbytes) for copy, leaf in self._conversions.staged()]
        self.pieces: list[tuple[int, int]] = []  # the plain bytes, on a device
        if arena.on_device is not None:
            self.pieces = merged(sorted((offset, size) for _, offset, size in rows if size))
        # Tied leaves given as two tensors of equal values may differ the next time.
        self._outline = seen.outline(row_of, converted_of) if seen is not None and seen.plain and not apart else None
        self._sources = _native.Sources(list(collected.watched_dicts or ()) if self._outline is None else [], rows)
        self._tensors = collected.tensors if self._outline is None else {}
        self._reusable = collected.watched_dicts is not None and not apart and self._outline is None
        self.given = frozenset(given)  # the places of the leaves that the source has
        self._arena = arena

    @property
    def fits_others(self) -> bool:
        """Is it good for other sources that are like its own?"""
        return self._outline is not None

    def take(self, source: object) -> bool | None:
        """Copy the tensors of this source from now on; False: it is of another kind. None: it lies in the slab.

        release() drops them.
        """
        assert self._outline is not None
        outline, order = self._outline
        converted: list[torch.Tensor] = []
        if not outline.fill(source, self._sources, converted):
            return False
        placed = dict(zip(order, converted, strict=True))
        self._conversions.use([placed[position] for position in range(len(placed))])
        # Always: the slab may have been mapped, since the last time, where the tensors of that time were.
        ranges = self._arena.ranges()
        inside = self._overlaps(ranges) or any(lies_in(tensor, ranges) for tensor in converted)
        return None if inside or (outline.moved and self.in_place) else True

    def release(self) -> None:
        """Keep no tensor of a source that take() was given."""
        self._sources.release()
        self._conversions.use([])

    @property
    def tensors(self) -> Mapping[Key, Any]:
        """Those that it was made for; none if it fits others."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes that copy_to() writes."""
        return self._sources.bytes + self._conversions.written

    @property
    def whole(self) -> bool:
        """Does the source have every leaf?"""
        return len(self.given) == len(self._arena.manifest.places)

    @property
    def lacking(self) -> list[Leaf]:
        """The leaves that the source has not, which keep their values; of tied ones one."""
        leaves = self._arena.manifest.leaves
        others = {leaf.offset: leaf for leaf in leaves if leaf.nbytes and leaf.offset not in self.given}
        return sorted(others.values(), key=lambda leaf: leaf.offset)

    def still_valid(self) -> bool:
        """Is the source exactly as it was checked? Addresses may have moved, but not into the slab."""
        return (
            self._reusable
            and (self._conversions.none or self._conversions.unchanged())
            and self._sources.revalidate()
            and not (self._sources.moved and (self.in_place or self._overlaps(self._arena.ranges())))
        )

    def _overlaps(self, ranges: list[tuple[int, int]]) -> bool:
        return any(self._sources.overlaps(begin, end) for begin, end in ranges)

    def stage(self) -> None:
        """Convert beforehand what is small; done before readers are kept out."""
        if not self._conversions.none:
            self._conversions.stage()

    @property
    def from_devices(self) -> bool:
        """May it copy from devices?"""
        return not self._conversions.none

    @property
    def devices(self) -> list[Device]:
        """The devices that it copies from."""
        return self._conversions.devices

    def convert(self, slot: int) -> list[tuple[int, int, int]]:
        """For a slot on a device: write what has to be converted there; what that device itself can copy, to be copied.

        The latter as (place in the slot, address, bytes).
        """
        self._conversions.write(slot)
        return self._conversions.held()

    def staged(self) -> list[tuple[int, int]]:
        """For a slot on a device: (place in the slot, bytes) of what aside() writes, in order."""
        return merged(sorted([*self.pieces, *((leaf.offset, leaf.nbytes) for leaf in self._conversions.from_host())]))

    def aside(self, staging: torch.Tensor) -> None:
        """For a slot on a device: write what lies in the host's memory, as the slot will have it, to staging memory."""
        self._sources.copy_to(staging.data_ptr())
        self._conversions.write_aside(staging)

    def copy_to(self, address: int, slot: int) -> None:
        """Write the given leaves into this slot, which starts at `address`; plain bytes in one native call."""
        if not self._conversions.none:
            self._conversions.write(slot)
        self._sources.copy_to(address)


def _own_place(tensor: torch.Tensor, leaf: Leaf, ranges: list[tuple[int, int]], slots: int, name: str) -> bool:
    """Is the source this leaf itself (slots = 1)? Raises ManifestMismatch when it lies anywhere else in the slab."""
    if not has_address(tensor):
        return False
    address = tensor.data_ptr()
    behind = address + extent(tensor) * tensor.element_size()
    for begin, end in ranges:
        if address >= end or behind <= begin:
            continue
        if slots == 1 and address - begin == leaf.offset and same_layout(tensor, leaf):
            return True
        raise ManifestMismatch(
            f"the source of {leaf.name} lies inside arena {name!r} itself, so publishing would read what it "
            "overwrites; publish a clone() of it"
        )
    return False
