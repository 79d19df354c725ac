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
from ...memory.arena import Arena
from ...memory.devices import has_address
from ...memory.manifest import Key, Leaf, merged
from ..source.leaf_check import extent
from ..source.manifest_check import describe_problems, direct, mismatches, same_bytes, same_layout, untied
from ..source.sources import Collected, WatchedDict
from .converting import Conversions
from .source_signature import Seen

_native.set_exchange_table(torch.Tensor)


class CopyPlan:
    """A checked source: which tensors are copied, which through a private copy, and which leaves keep their value.

    Attributes:
        kind: the class of the source that it was made for, if it fits others.
        conversions: the leaves that cannot be copied as plain bytes of the host; stage() them before readers are kept
            out. Only they may come from devices.
    """

    def __init__(
        self, collected: Collected, arena: Arena, name: str, *, partial: bool, any_device: bool, seen: Seen | None
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
        self.in_place = False  # does it have leaves that are the slab itself, at the place where they belong?
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
            in_place = _own_place(tensor, leaf, ranges, arena.slots, name)
            self.in_place |= in_place
            if in_place or direct(tensor, leaf):
                row_of[key] = len(rows)
                # In its place there is nothing to copy, as long as it stays there.
                rows.append((tensor, leaf.offset, 0 if in_place else leaf.nbytes))
            else:
                converted_of[key] = len(converted)
                converted.append((tensor, leaf))
        self.conversions = Conversions(arena, converted)
        rows += [(copy, leaf.offset, leaf.nbytes) for copy, leaf in self.conversions.staged]
        self.pieces: list[tuple[int, int]] = []  # the plain bytes, on a device
        if arena.on_device is not None:
            self.pieces = merged(sorted((offset, size) for _, offset, size in rows if size))
        # Tied leaves given as two tensors of equal values may differ the next time.
        self._outline = seen.outline(row_of, converted_of) if seen is not None and seen.plain and not apart else None
        watched: list[WatchedDict] = []
        if self._outline is None:
            watched = collected.watched_dicts or []
            rows += [(tensor, 0, 0) for tensor, _ in converted]  # to notice when they change
        self._sources = _native.Sources(watched, rows)
        self.kind: type | None = None
        self.fits_others = self._outline is not None  # is it good for other sources that are like its own?
        # Those that it was made for; none if it fits others.
        self.tensors: Mapping[Key, Any] = {} if self.fits_others else collected.tensors
        self._reusable = collected.watched_dicts is not None and not apart and not self.fits_others
        self.given = frozenset(given)  # the places of the leaves that the source has
        self.whole = len(given) == len(arena.manifest.places)  # does the source have every leaf?
        self.nbytes = self._sources.bytes + self.conversions.written  # that copy_to() writes
        self._arena = arena

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
        self.conversions.use([placed[position] for position in range(len(placed))])
        # Always: the slab may have been mapped, since the last time, where the tensors of that time were.
        ranges = self._arena.ranges()
        inside = self._sources.overlaps(ranges) or outline.converts_within(ranges)
        return None if inside or (outline.moved and self.in_place) else True

    def release(self) -> None:
        """Keep no tensor of a source that take() was given."""
        self._sources.release()
        self.conversions.use([])

    @property
    def lacking(self) -> list[Leaf]:
        """The leaves that the source has not, which keep their values; of tied ones one."""
        leaves = self._arena.manifest.leaves
        others = {leaf.offset: leaf for leaf in leaves if leaf.nbytes and leaf.offset not in self.given}
        return sorted(others.values(), key=lambda leaf: leaf.offset)

    def still_valid(self) -> bool:
        """Is the source exactly as it was checked? Addresses of plain bytes may have moved, but not into the slab."""
        if not self._reusable:
            return False
        self._reusable = False  # for good, should an interrupt come before an address that has moved is looked at
        sources = self._sources
        self._reusable = sources.revalidate() and not (sources.moved and sources.overlaps(self._arena.ranges()))
        return self._reusable

    def staged(self) -> list[tuple[int, int]]:
        """For a slot on a device: (place in the slot, bytes) of what aside() writes, in order."""
        return merged(sorted([*self.pieces, *((leaf.offset, leaf.nbytes) for leaf in self.conversions.from_host)]))

    def aside(self, staging: torch.Tensor) -> None:
        """For a slot on a device: write what lies in the host's memory, as the slot will have it, to staging memory."""
        self._sources.copy_to(staging.data_ptr())
        self.conversions.write_aside(staging)

    def copy_to(self, address: int, slot: int) -> None:
        """Write the given leaves into this slot, which starts at `address`; plain bytes in one native call."""
        if not self.conversions.none:
            self.conversions.write(slot)
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
