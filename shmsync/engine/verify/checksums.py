"""Checksums of leaves: XXH3 with 64 bits over a leaf's bytes, one for each leaf, behind the leaves of every slot.

They are written before the commit, so a version and its checksums appear in one step, and a section that reads the one
reads the other. Tied leaves share one.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection
from typing import Any

import torch

from ...errors import ProtocolError
from ...memory.arena import Arena
from ...memory.devices import assign, laid_out
from ...memory.manifest import Manifest
from ...memory.strides import contiguous
from ...memory.torch_modes import run_plainly

BYTES_PER_SECOND = 1e9  # a checksum is never slower on the machines we know; says whether there is time for one


def check_checksum(wanted: object) -> None:
    """Raise what speaks against `checksum=`: another type, no xxhash."""
    if not isinstance(wanted, bool):
        raise TypeError(f"checksum is True or False, not {wanted!r}")
    if wanted:
        _library()


def refuse_without_checksums(manifest: Manifest, name: str) -> None:
    """Raise ProtocolError for an arena that has no checksums."""
    if manifest.sums is None:
        raise ProtocolError(f"arena {name!r} has no checksums to verify against; make its Publisher with checksum=True")
    _library()


@run_plainly
def checksum_of(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> int:
    """Of a tensor's values, in the order of a leaf's strides; None: in rows. They must be dense."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    plain = laid_out(plain, contiguous(plain.shape) if strides is None else strides)
    return int(_library().xxh3_64_intdigest(memory(plain.data_ptr(), plain.nbytes)))


def memory(address: int, size: int) -> memoryview:
    """These bytes, for as long as the caller keeps them mapped."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B") if size else memoryview(bytearray())


def checksums_in(arena: Arena, slot: int) -> dict[int, int]:
    """The checksums that a slot shows, by the offset of their leaf. Call it inside a section."""
    manifest = arena.manifest
    assert manifest.sums is not None
    words = slot_bytes(arena, slot, manifest.sums, manifest.written_bytes).cast("Q")
    return dict(zip(manifest.places, words, strict=True))


class ChecksumWriter:
    """The publisher's side: which leaves of the slot to write are new, and what the others' checksums are."""

    def __init__(self, arena: Arena) -> None:
        manifest = arena.manifest
        assert manifest.sums is not None
        self._arena = arena
        self._at = manifest.sums
        self._places = manifest.places
        self._known: dict[int, int] = {}  # of the published version
        self._given: frozenset[int] | None = None
        self._new: dict[int, int] = {}

    def begin(self, given: frozenset[int] | None) -> None:
        """Only the leaves at these offsets change; None: any may have changed."""
        self._given = given

    @run_plainly
    def write(self, slot: int) -> None:
        """Read the leaves that have changed, and write every checksum into the slot. The caller commits.

        On a device the leaves are fetched, and must be there; the checksums are there when its current stream is done.
        """
        arena = self._arena
        changed: Collection[int] = self._places  # the leaves whose checksums are not known
        if self._given is not None:
            changed = {offset for offset in self._places if offset in self._given or offset not in self._known}
        # From a device one copy of all of them, and else one for each leaf.
        whole = slot_bytes(arena, slot, 0, self._at) if len(changed) == len(self._places) else None
        digest = _library().xxh3_64_intdigest
        new: dict[int, int] = {}
        for offset, size in self._places.items():
            if offset in changed:
                end = offset + size
                new[offset] = digest(slot_bytes(arena, slot, offset, end) if whole is None else whole[offset:end])
            else:
                new[offset] = self._known[offset]
        # Until the version is known to be published, nothing is known: an interrupt may come before committed().
        self._known, self._new = {}, new
        words = array("Q", new.values()).tobytes()
        if arena.on_device is None:
            memory(arena.slot_address(slot) + self._at, len(words))[:] = words
        elif new:
            place = _raw(arena, slot, self._at, self._at + len(words))
            assign(place, torch.frombuffer(bytearray(words), dtype=torch.uint8))

    def committed(self) -> None:
        """What was written is published."""
        self._known, self._given = self._new, None

    def undone(self) -> None:
        """What was begun was not published; the only slot may be half written."""
        self._given = None


def _raw(arena: Arena, slot: int, begin: int, end: int) -> torch.Tensor:
    start = slot * arena.manifest.slot_bytes + begin
    return torch.empty(0, dtype=torch.uint8, device=arena.device).set_(arena.slab.readonly, start, (end - begin,), (1,))


@run_plainly
def slot_bytes(arena: Arena, slot: int, begin: int, end: int) -> memoryview:
    """This part of a slot in the host's memory: itself, or a copy from a device."""
    if arena.on_device is None:
        return memory(int(arena.slab.readonly.data_ptr()) + slot * arena.manifest.slot_bytes + begin, end - begin)
    copy: Any = _raw(arena, slot, begin, end).cpu().numpy()
    return memoryview(copy)


def _library() -> Any:
    try:
        import xxhash
    except ImportError:
        raise ProtocolError("checksums need the package xxhash; pip install 'shmsync[verify]'") from None
    return xxhash
