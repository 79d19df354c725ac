"""The manifest: the ordered list of leaves of an arena, and where each stands in a slot.

A leaf is a key path, a dtype, a shape, strides and an offset. Tied tensors share one offset. The manifest is written as
JSON into the control segment; its fingerprint is part of the header, so that a mismatched reader refuses to attach.

Each leaf's strides are dense, as those of a contiguous tensor whose dimensions were permuted: channels_last,
transposed. A tensor with gaps, or with several elements in one place, is laid out as its clone() would be.

The command line reads manifests without torch: torch is imported when a leaf is asked for its `dtype`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import ArenaCorrupt

if TYPE_CHECKING:
    import torch

    from .. import _native

SLOT_ALIGNMENT = 2 << 20  # bytes; one huge page
TENSOR_ALIGNMENT = 256  # bytes

Key = tuple[str, ...]
Strides = tuple[int, ...]

# Elements of any dtype: a stride of so many bytes is still a number. That of a dimension of size 1 may be any.
_FARTHEST = 2**63 // 16
_CAST, _UNSAVED = 1, 2  # marks of a leaf


def round_up(size: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-size // alignment) * alignment


def merged(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places in a slot as (offset, bytes), by offset: neighbours in one piece, with the padding between them."""
    pieces: list[tuple[int, int]] = []
    for offset, size in places:
        if pieces and offset - sum(pieces[-1]) < TENSOR_ALIGNMENT:
            begin = pieces[-1][0]
            pieces[-1] = (begin, offset + size - begin)
        else:
            pieces.append((offset, size))
    return pieces


def tree(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Values by key path as a dict of dicts."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        level = root
        for part in key[:-1]:
            level = level.setdefault(part, {})
        level[key[-1]] = value
    return root


@dataclass(frozen=True)
class Leaf:
    """One tensor of the weights. INV: its strides are dense, so its bytes are those from `offset` on."""

    key: Key
    dtype_name: str  # as torch names it: "float32"
    shape: tuple[int, ...]
    strides: Strides
    offset: int  # bytes from the start of the slot
    cast: bool = False  # dtype= chose its dtype: floating sources of any dtype are cast to it
    saved: bool = field(default=True, compare=False)  # False: a buffer that is in no state_dict()

    @cached_property
    def dtype(self) -> torch.dtype:
        """Torch's own object for the dtype. Raises ArenaCorrupt where this torch has none of the name."""
        found = _dtypes().get(self.dtype_name)
        if found is None:
            raise ArenaCorrupt(f"leaf {self.name!r} is {self.dtype_name[:40]}, which this torch lacks; use one version")
        return found

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * element_bytes(self.dtype_name)

    @cached_property
    def name(self) -> str:
        """The key path with dots."""
        return ".".join(self.key)


@dataclass(frozen=True)
class Manifest:
    """The leaves of an arena, in order."""

    leaves: tuple[Leaf, ...]
    filtered: bool = False  # made with include= or exclude=: a module may have more than the arena
    by_key: dict[Key, Leaf] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {leaf.key: leaf for leaf in self.leaves})

    @cached_property
    def by_name(self) -> dict[str, Leaf]:
        """Leaves by dotted key."""
        return {leaf.name: leaf for leaf in self.leaves}

    @cached_property
    def places(self) -> dict[int, int]:
        """The offset of each leaf that has bytes, and how many; tied leaves are one place."""
        return {leaf.offset: leaf.nbytes for leaf in self.leaves if leaf.nbytes}

    @cached_property
    def used_bytes(self) -> int:
        """Bytes of a slot that hold leaves, padding between them included."""
        return max((leaf.offset + leaf.nbytes for leaf in self.leaves), default=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return max(SLOT_ALIGNMENT, round_up(self.used_bytes, SLOT_ALIGNMENT))

    @classmethod
    def of(
        cls,
        tensors: Mapping[Key, torch.Tensor],
        *,
        dtypes: Mapping[Key, torch.dtype] | None = None,
        filtered: bool = False,
        unsaved: Collection[Key] = (),
    ) -> Manifest:
        """Lay out the tensors in their order; `dtypes` has the leaves that are cast, and to what.

        `unsaved`: buffers that are in no state_dict().
        """
        dtypes = dtypes or {}
        leaves = []
        offset = 0
        placed: dict[tuple[object, ...], int] = {}  # by what tied leaves have in common; of others by the key
        for key, tensor in tensors.items():
            kept = dtypes.get(key, tensor.dtype)
            shape = tuple(tensor.shape)
            place = placed.setdefault(tie(tensor) or key, offset)
            leaf = Leaf(key, str(kept)[6:], shape, layout_of(tensor), place, key in dtypes, key not in unsaved)
            leaf.__dict__["dtype"] = kept  # as the cached property would find it
            leaves.append(leaf)
            if place == offset:  # it is tied to no leaf before it
                offset = round_up(offset + leaf.nbytes, TENSOR_ALIGNMENT)
        return cls(tuple(leaves), filtered=filtered)

    def to_json(self) -> bytes:
        """UTF-8 JSON; the same leaves give the same bytes."""
        leaves = [
            [
                list(leaf.key), leaf.dtype_name, list(leaf.shape), leaf.offset,
                _CAST * leaf.cast + _UNSAVED * (not leaf.saved),
                *([] if leaf.strides == contiguous(leaf.shape) else [list(leaf.strides)]),
            ]
            for leaf in self.leaves
        ]  # fmt: skip
        document: dict[str, object] = {"leaves": leaves, "filtered": self.filtered}
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes, slot_bytes: int) -> Manifest:
        """What to_json() has written. Its fingerprint was checked, and only this user can have forged that.

        Raises ArenaCorrupt for another form: that of another version of shmsync.
        """
        try:
            document = json.loads(text)
            return cls(tuple(_leaf(entry, slot_bytes) for entry in document["leaves"]), document["filtered"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArenaCorrupt(f"the arena's manifest cannot be read: {str(error)[:500]}") from error


@cache
def _dtypes() -> dict[str, torch.dtype]:
    """Torch's dtypes by name.

    Not getattr(torch, name): that imports modules for some names, and a manifest is another process's text.
    """
    import torch

    return {str(value)[6:]: value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@cache
def element_bytes(dtype_name: str) -> int:
    """Bytes of an element, by the bits that torch's names of dtypes tell. Raises ValueError for another name."""
    bits = re.search(r"\d+", dtype_name)
    if bits is None and dtype_name != "bool":
        raise ValueError(f"there is no dtype {dtype_name[:40]!r}")
    return max(1, int(bits.group()) // 8) if bits else 1


def _leaf(entry: Any, slot_bytes: int) -> Leaf:
    key, dtype_name, shape, offset, marks, *strides = entry
    sizes = tuple(shape)
    leaf = Leaf(
        tuple(key), dtype_name, sizes, tuple(strides[0]) if strides else contiguous(sizes), offset,
        bool(marks & _CAST), not marks & _UNSAVED,
    )  # fmt: skip
    if not 0 <= leaf.offset <= leaf.offset + leaf.nbytes <= slot_bytes:
        raise ValueError(f"leaf {leaf.name!r} ends beyond a slot of {slot_bytes} bytes")
    return leaf


def checked_manifest(name: str, text: bytes, header: _native.Header) -> Manifest:
    """The manifest of a segment from its bytes, checked against the header. Raises ArenaCorrupt."""
    if fingerprint(text) != header.fingerprint:
        raise ArenaCorrupt(
            f"the manifest of arena {name!r} has fingerprint {fingerprint(text):#x} but its header says "
            f"{header.fingerprint:#x}; attach again"
        )
    manifest = Manifest.from_json(text, header.slot_bytes)
    if manifest.slot_bytes != header.slot_bytes:
        raise ArenaCorrupt(f"slots of arena {name!r} are {header.slot_bytes} bytes, not {manifest.slot_bytes}")
    return manifest


def fingerprint(manifest_json: bytes) -> int:
    """64 bits of SHA-256 over the manifest's bytes."""
    return int.from_bytes(hashlib.sha256(manifest_json).digest()[:8], "little")


def tie(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Equal for tensors that show the same memory in the same way, as tied ones do; None for one without memory."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return (
        tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


# Strides.


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
