"""Weights on their way to another machine: one flat buffer, laid out as a slot of an arena is, and what it means.

They unpickle as the TensorDict or the dict that was sent, whose tensors are views of the received buffer. Under Ray
that buffer is the object store itself, which all actors of a node see and can write into. So views go only to readers
that never write (see allow_views()); others get a copy.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import logging
import os
import reprlib
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy
import torch
from tensordict import TensorDict, TensorDictBase

from ... import _native
from ...engine.source.manifest_check import direct
from ...engine.source.sources import check_keys
from ...engine.source.strategy import leaves_of, refuse_odd
from ...errors import NoSpace, ProtocolError
from ...memory.arena import nested, view
from ...memory.control.segment import Handle
from ...memory.devices import laid_out
from ...memory.manifest import Key, Manifest
from ...memory.slab.memfd import Reusable
from ...memory.torch_modes import run_plainly

_log = logging.getLogger("shmsync")

Kind = Literal["tensordict", "flat", "nested"]


class Stamp(NamedTuple):
    """Which weights these are."""

    session: str  # of the sender; another trainer begins its versions again
    model_id: str
    version: int


class Announcement(NamedTuple):
    """Weights that lie in an arena on this node. WeightReceiver.apply_weights() takes it like any weights."""

    stamp: Stamp
    handle: Handle


class Label(NamedTuple):
    """What a buffer means."""

    stamp: Stamp
    kind: Kind
    manifest: bytes  # JSON
    extra: dict[Key, Any]  # what modules keep beside their tensors
    starts: tuple[int, ...] = (0,)  # the first byte of each piece of the buffer


class WeightsDict(dict[str, Any]):
    """A state_dict or nested dict that came from a sender."""

    stamp: Stamp


@dataclass(eq=False, repr=False)
class PackedWeights:
    """Weights packed for transport: a buffer, in one piece or in several. Unpickles as the weights themselves."""

    label: Label
    pieces: Sequence[torch.Tensor | numpy.ndarray]
    memory: Reusable | None = None  # in which all pieces lie, one after the other, where others may map it

    @property
    def buffer(self) -> torch.Tensor:
        """The only piece."""
        (piece,) = self.pieces
        assert isinstance(piece, torch.Tensor)
        return piece

    @property
    def whole(self) -> torch.Tensor:
        """All pieces as one, of packed weights that has `memory`."""
        assert self.memory is not None
        return self.memory.tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.label, *self.pieces)


class Packer:
    """Packs weights. A buffer without a reader is used again: fresh memory costs more than the copy.

    INV: a reader of a buffer keeps its PackedWeights.

    Args:
        piece_bytes: begin a new piece of the buffer with the leaf that would make the last one larger; None: one piece.
        shared_from: buffers of so many bytes and more may be mapped by other processes, if the system has room for it;
            None: none are.
    """

    def __init__(self, piece_bytes: int | None = None, *, shared_from: int | None = None) -> None:
        self.session = secrets.token_hex(8)
        self._piece_bytes = piece_bytes
        self._shared_from = shared_from
        self._warned = False  # that there is no room for a buffer that may be mapped
        self._free: deque[_PackedMemory] = deque(maxlen=2)
        self._manifest: tuple[Any, Manifest, bytes] | None = None  # of the last weights, by what they are made of

    @run_plainly
    def pack(self, weights: Any, model_id: str, version: int) -> PackedWeights:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        refuse_odd(tensors)
        check_keys(tensors)
        manifest, text = self._layout(tensors)
        starts = self._starts(manifest)
        buffer = self._take([end - start for start, end in itertools.pairwise([*starts, manifest.used_bytes])])
        _copy(tensors, manifest, starts, buffer.pieces)
        label = Label(Stamp(self.session, model_id, version), _kind(weights), text, extra, starts)
        packed_weights = PackedWeights(label, buffer.pieces, buffer.memory)
        weakref.finalize(packed_weights, self._free.append, buffer).atexit = False
        return packed_weights

    def forget(self) -> None:
        """Use no buffer again: it is not known any more who reads them."""
        self._free = deque(maxlen=2)

    def _layout(self, tensors: Mapping[Key, torch.Tensor]) -> tuple[Manifest, bytes]:
        made_of = [(key, t.dtype, t.shape, t.stride(), t.data_ptr()) for key, t in tensors.items()]
        if self._manifest is None or self._manifest[0] != made_of:
            manifest = Manifest.of(tensors)
            self._manifest = made_of, manifest, manifest.to_json()
        return self._manifest[1:]

    def _starts(self, manifest: Manifest) -> tuple[int, ...]:
        starts = [0]
        if self._piece_bytes is not None:
            for leaf in sorted(manifest.leaves, key=lambda leaf: leaf.offset):
                if leaf.offset > starts[-1] and leaf.offset + leaf.nbytes - starts[-1] > self._piece_bytes:
                    starts.append(leaf.offset)
        return tuple(starts)

    def _take(self, sizes: list[int]) -> _PackedMemory:
        while self._free:
            buffer = self._free.pop()
            of_parent = buffer.memory is not None and buffer.memory.maker != os.getpid()
            if [piece.nbytes for piece in buffer.pieces] == sizes and not of_parent:
                return buffer
        if self._shared_from is not None and sum(sizes) >= self._shared_from:
            try:
                memory = Reusable(sum(sizes))
                return _PackedMemory(memory.split(sizes), memory)
            except NoSpace as error:
                if not self._warned:
                    self._warned = True
                    _log.warning("workers cannot fetch weights from this process (%s); they go by slower means", error)
        return _PackedMemory([torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes], None)


class _PackedMemory(NamedTuple):
    """The memory of packed weights."""

    pieces: list[torch.Tensor]
    memory: Reusable | None


def _copy(
    tensors: Mapping[Key, torch.Tensor], manifest: Manifest, starts: tuple[int, ...], pieces: list[torch.Tensor]
) -> None:
    rows = []
    for leaf in {leaf.offset: leaf for leaf in manifest.leaves if leaf.nbytes}.values():
        source = tensors[leaf.key]
        if not direct(source, leaf):
            source = laid_out(source.detach().cpu().resolve_conj().resolve_neg(), leaf.strides)
        number = bisect.bisect(starts, leaf.offset) - 1
        rows.append((source, pieces[number].data_ptr() + leaf.offset - starts[number], leaf.nbytes))
    if rows:
        _native.Sources([], rows).copy_to(0)  # each to a separate address


def _kind(weights: Any) -> Kind:
    if isinstance(weights, TensorDictBase):
        return "tensordict"
    values = (value for key, value in weights.items() if not key.endswith("_extra_state"))  # that may be a dict too
    return "nested" if any(isinstance(value, Mapping) for value in values) else "flat"


# What reads the weights of a model (None: of all) in this process, and never writes into them.
_readers: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
_readers_lock = threading.Lock()


def allow_views(reader: Any, model_id: str | None = None) -> None:
    """From now on, and as long as this reader lives, this model's weights unpickle as views of the buffer.

    `reader` copies them and never writes into them; model_id=None: it does so with those of all models.
    """
    with _readers_lock:
        _readers[reader] = model_id


def views_will_do(label: Label) -> bool:
    """May these weights be views of memory that others read too? Only if they are read here and never written."""
    with _readers_lock:
        return any(model_id in (None, label.stamp.model_id) for model_id in _readers.values())


@run_plainly
def unpack(label: Label, *pieces: torch.Tensor | numpy.ndarray) -> TensorDict | WeightsDict:
    """The weights that were sent, as views of the buffer, with their stamp."""
    manifest = _checked(label, [piece.nbytes for piece in pieces])
    copy = not views_will_do(label)
    storages = [_as_tensor(piece, copy=copy).untyped_storage() for piece in pieces]
    views = {}
    for leaf in manifest.leaves:
        number = bisect.bisect(label.starts, leaf.offset) - 1
        views[leaf.key] = view(storages[number], leaf, leaf.offset - label.starts[number])
    weights: TensorDict | WeightsDict
    if label.kind == "tensordict":
        weights = nested(views)
        for path, state in label.extra.items():
            weights.set((*path, "__extra_state__"), state)
    else:
        weights = WeightsDict(
            {".".join(key): tensor for key, tensor in views.items()}
            if label.kind == "flat"
            else nested(views).to_dict(retain_none=False)
        )
        weights.update({".".join((*path, "_extra_state")): state for path, state in label.extra.items()})
    weights.stamp = label.stamp
    return weights


def _checked(label: Label, sizes: list[int]) -> Manifest:
    """The manifest of weights that came, when every leaf of it is in the buffers that came with it.

    torch makes a storage larger where a view of it would end beyond, so that a label could ask for any memory.
    """
    manifest = _parsed(label.manifest) if isinstance(label.manifest, bytes) else None
    starts, kinds = label.starts, get_args(Kind)
    wrong = ""
    if manifest is None or label.kind not in kinds or not isinstance(label.extra, Mapping):
        wrong = f"are of kind {reprlib.repr(label.kind)}, one of {', '.join(kinds)} is needed, or have no manifest"
    elif not isinstance(starts, (tuple, list)) or not all(type(start) is int for start in starts):
        wrong = f"have pieces at {reprlib.repr(starts)}, which are no numbers"
    elif len(starts) != len(sizes) or [*starts[:1]] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
        wrong = f"have pieces at {reprlib.repr(starts)}, and {len(sizes)} came"
    else:
        for leaf in manifest.leaves:
            number = bisect.bisect(starts, leaf.offset) - 1
            end = leaf.offset - starts[number] + leaf.nbytes
            if leaf.nbytes and end > sizes[number]:
                wrong = f"have {leaf.name!r} up to byte {end:,} of a buffer of {sizes[number]:,} bytes"
                break
    if wrong or manifest is None:
        raise ProtocolError(f"weights that came {wrong}; they are left out, run the same shmsync on both sides")
    return manifest


@lru_cache(maxsize=16)
def _parsed(text: bytes) -> Manifest:
    return Manifest.from_json(text, 2**63)


def _as_tensor(piece: torch.Tensor | numpy.ndarray, *, copy: bool) -> torch.Tensor:
    """Over the array's own memory, or a copy. torch.from_numpy() would warn each time that it is read-only."""
    if isinstance(piece, torch.Tensor):
        return piece
    if copy or not piece.nbytes:
        return torch.from_numpy(piece.copy())
    memory = (ctypes.c_uint8 * piece.nbytes).from_address(piece.ctypes.data)
    memory.array = piece  # type: ignore[attr-defined]  # keeps it
    return torch.frombuffer(memory, dtype=torch.uint8)


def stamp_of(weights: Any) -> Stamp | None:
    """Which weights these are, if a sender of ours sent them."""
    stamp = getattr(weights, "stamp", None)
    return stamp if isinstance(stamp, Stamp) else None
