"""Weights on their way to another machine: one flat buffer, laid out as a slot of an arena is, and a label.

They unpickle as the TensorDict or the dict that was sent, whose tensors are views of the received buffer. Under Ray
that buffer is the object store itself, which all actors of a node map. So views go only to readers that copy them and
never write (allow_views()); others get a private copy.
"""

from __future__ import annotations

import ctypes
import secrets
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy
import torch
from tensordict import TensorDict, TensorDictBase

from ... import _native
from ...engine.source.manifest_check import direct
from ...engine.source.sources import check_keys
from ...memory.arena import nested, view
from ...memory.devices import laid_out
from ...memory.manifest import Key, Manifest
from ...memory.torch_modes import run_plainly
from ..strategy import STATE_KEY, Leaves, leaves_of, refuse_odd

Kind = Literal["tensordict", "flat", "nested"]


class Label(NamedTuple):
    """Which weights a buffer has, and where in it."""

    session: str  # of the sender; another trainer begins its versions again
    model_id: str
    version: int
    kind: Kind  # what it unpickles as
    manifest: bytes  # JSON
    extra: dict[Key, Any]  # what modules keep beside their tensors


class WeightsDict(dict[str, Any]):
    """A state_dict or nested dict that came from a sender."""

    label: Label


@dataclass(eq=False, repr=False)
class PackedWeights:
    """Weights packed for transport. Unpickles as the weights themselves, with their label as `.label`."""

    label: Label
    buffer: Any  # uint8: a tensor, or an array, which Ray writes into its store without pickling it

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.label, self.buffer)


class Packer:
    """Packs weights. A buffer without a reader is used again: fresh memory costs more than the copy.

    INV: a reader of a buffer keeps its PackedWeights.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self._free: deque[torch.Tensor] = deque(maxlen=2)
        self._layout: tuple[Any, Manifest, bytes] | None = None  # of the last weights, by what they are made of

    @run_plainly
    def pack(self, weights: Any, model_id: str, version: int) -> PackedWeights:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        refuse_odd(tensors)
        check_keys(tensors)
        made_of = [(key, t.dtype, t.shape, t.stride(), t.data_ptr()) for key, t in tensors.items()]
        if self._layout is None or self._layout[0] != made_of:
            manifest = Manifest.of(tensors)
            self._layout = made_of, manifest, manifest.to_json()
        _, manifest, text = self._layout
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes != manifest.used_bytes:
            buffer = torch.empty(manifest.used_bytes, dtype=torch.uint8, device="cpu")
        _copy(tensors, manifest, buffer)
        packed = PackedWeights(Label(self.session, model_id, version, _kind(weights), text, extra), buffer)
        weakref.finalize(packed, self._free.append, buffer).atexit = False
        return packed


def _copy(tensors: Leaves, manifest: Manifest, buffer: torch.Tensor) -> None:
    rows, kept = [], []
    for leaf in {leaf.offset: leaf for leaf in manifest.leaves if leaf.nbytes}.values():
        source = tensors[leaf.key]
        if not direct(source, leaf):
            source = laid_out(source.detach().cpu().resolve_conj().resolve_neg(), leaf.strides)
        kept.append(source)  # until it is copied
        rows.append((buffer.data_ptr() + leaf.offset, source.data_ptr(), leaf.nbytes))
    _native.copy(rows)


def _kind(weights: Any) -> Kind:
    if isinstance(weights, TensorDictBase):
        return "tensordict"
    values = (value for key, value in weights.items() if not key.endswith(STATE_KEY))  # that may be a dict too
    return "nested" if any(isinstance(value, Mapping) for value in values) else "flat"


_readers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # which copy the weights of this model


def allow_views(reader: Any, model_id: str) -> None:
    """As long as this reader lives, weights of this model unpickle as views here: `reader` only copies them."""
    _readers[reader] = model_id


@run_plainly
def unpack(label: Label, buffer: torch.Tensor | numpy.ndarray) -> TensorDict | WeightsDict:
    """The weights that were sent, as views of the buffer, with their label."""
    manifest = _parsed(label.manifest)
    private = label.model_id not in list(_readers.values())
    storage = _as_tensor(buffer, copy=private).untyped_storage()
    views = {leaf.key: view(storage, leaf, leaf.offset) for leaf in manifest.leaves}
    weights: TensorDict | WeightsDict
    if label.kind == "tensordict":
        weights = nested(views)
        for path, state in label.extra.items():
            weights.set((*path, "__extra_state__"), state)
    else:
        flat = label.kind == "flat"
        named = {".".join(key): tensor for key, tensor in views.items()} if flat else nested(views).to_dict()
        weights = WeightsDict(named)
        weights.update({".".join((*path, STATE_KEY)): state for path, state in label.extra.items()})
    weights.label = label
    return weights


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


def label_of(weights: Any) -> Label | None:
    """The label of weights that a sender of ours sent."""
    label = getattr(weights, "label", None)
    return label if isinstance(label, Label) else None
