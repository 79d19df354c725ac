"""Weights on their way to another machine: one flat buffer, laid out as a slot of an arena is, and what it means.

They unpickle as the TensorDict or the dict that was sent, whose tensors are views of the received buffer. Under Ray
that buffer is the object store itself, which all actors of a node see and can write into. So views go only to readers
that never write (see allow_views()); others get a copy.
"""

from __future__ import annotations

import ctypes
import reprlib
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy
import torch
from tensordict import TensorDict, TensorDictBase

from ... import _native
from ...engine.source.manifest_check import direct
from ...engine.source.sources import check_keys
from ...errors import ProtocolError
from ...memory.arena import nested, view
from ...memory.devices import laid_out
from ...memory.manifest import Key, Manifest
from ...memory.segment import Handle
from ...memory.torch_modes import run_plainly
from ..strategy import leaves_of, refuse_odd

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


class WeightsDict(dict[str, Any]):
    """A state_dict or nested dict that came from a sender."""

    stamp: Stamp


@dataclass(eq=False, repr=False)
class PackedWeights:
    """Weights packed for transport. Unpickles as the weights themselves."""

    label: Label
    buffer: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.label, self.buffer)


class Packer:
    """Packs weights. A buffer without a reader is used again: fresh memory costs more than the copy.

    INV: a reader of a buffer keeps its PackedWeights.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self._free: deque[torch.Tensor] = deque(maxlen=2)
        self._manifest: tuple[Any, Manifest, bytes] | None = None  # of the last weights, by what they are made of

    @run_plainly
    def pack(self, weights: Any, model_id: str, version: int) -> PackedWeights:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        refuse_odd(tensors)
        check_keys(tensors)
        manifest, text = self._layout(tensors)
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes != manifest.used_bytes:
            buffer = torch.empty(manifest.used_bytes, dtype=torch.uint8, device="cpu")
        _copy(tensors, manifest, buffer)
        label = Label(Stamp(self.session, model_id, version), _kind(weights), text, extra)
        packed_weights = PackedWeights(label, buffer)
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


def _copy(tensors: Mapping[Key, torch.Tensor], manifest: Manifest, buffer: torch.Tensor) -> None:
    rows = []
    for leaf in {leaf.offset: leaf for leaf in manifest.leaves if leaf.nbytes}.values():
        source = tensors[leaf.key]
        if not direct(source, leaf):
            source = laid_out(source.detach().cpu().resolve_conj().resolve_neg(), leaf.strides)
        rows.append((source, buffer.data_ptr() + leaf.offset, leaf.nbytes))
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
def unpack(label: Label, buffer: torch.Tensor | numpy.ndarray) -> TensorDict | WeightsDict:
    """The weights that were sent, as views of the buffer, with their stamp."""
    manifest = _checked(label, buffer.nbytes)
    copy = not views_will_do(label)
    storage = _as_tensor(buffer, copy=copy).untyped_storage()
    views = {leaf.key: view(storage, leaf, leaf.offset) for leaf in manifest.leaves}
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


def _checked(label: Label, size: int) -> Manifest:
    """The manifest of weights that came, when every leaf of it is in the buffer that came with it.

    torch makes a storage larger where a view of it would end beyond, so that a label could ask for any memory.
    """
    manifest = _parsed(label.manifest) if isinstance(label.manifest, bytes) else None
    kinds = get_args(Kind)
    wrong = ""
    if manifest is None or label.kind not in kinds or not isinstance(label.extra, Mapping):
        wrong = f"are of kind {reprlib.repr(label.kind)}, one of {', '.join(kinds)} is needed, or have no manifest"
    else:
        for leaf in manifest.leaves:
            if leaf.nbytes and leaf.offset + leaf.nbytes > size:
                wrong = f"have {leaf.name!r} up to byte {leaf.offset + leaf.nbytes:,} of a buffer of {size:,} bytes"
                break
    if wrong or manifest is None:
        raise ProtocolError(f"weights that came {wrong}; they are left out, run the same shmsync on both sides")
    return manifest


@lru_cache(maxsize=16)
def _parsed(text: bytes) -> Manifest:
    return Manifest.from_json(text, 2**63)


def _as_tensor(buffer: torch.Tensor | numpy.ndarray, *, copy: bool) -> torch.Tensor:
    """Over the array's own memory, or a copy. torch.from_numpy() would warn each time that it is read-only."""
    if isinstance(buffer, torch.Tensor):
        return buffer
    if copy or not buffer.nbytes:
        return torch.from_numpy(buffer.copy())
    memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data)
    memory.array = buffer  # type: ignore[attr-defined]  # keeps it
    return torch.frombuffer(memory, dtype=torch.uint8)


def stamp_of(weights: Any) -> Stamp | None:
    """Which weights these are, if a sender of ours sent them."""
    stamp = getattr(weights, "stamp", None)
    return stamp if isinstance(stamp, Stamp) else None
