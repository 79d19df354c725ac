"""Weights on their way to another machine: one flat buffer, laid out as a slot of an arena is, and what it means.

Who gets a parcel sees the TensorDict or the dict that was sent, its tensors being views of the buffer that came. Under
Ray that buffer is the object store itself, which all actors of a node see, and nothing keeps anybody from writing into
it: so only our own receivers, which copy from it, get it as it is. Others get a copy.
"""

from __future__ import annotations

import ctypes
import secrets
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy
import torch
from tensordict import TensorDict, TensorDictBase

from ... import _native
from ..._segment import Handle
from ..._transfer import direct
from ..._weights import check_keys, problem_with
from ...arena import view
from ...errors import ManifestMismatch
from ...manifest import Key, Manifest
from ...strategy import leaves_of, nested

Kind = Literal["tensordict", "flat", "nested"]


class Stamp(NamedTuple):
    """Which weights these are."""

    session: str  # of the sender; another trainer counts its versions anew
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


class Parcel:
    """Weights packed for transport. Unpickles as the weights themselves."""

    def __init__(self, label: Label, buffer: torch.Tensor | numpy.ndarray) -> None:
        self.label = label
        self.buffer = buffer

    @property
    def nbytes(self) -> int:
        """Bytes that cross the network, but for the label."""
        return int(self.buffer.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.label, self.buffer)


class Packer:
    """Packs parcels. A buffer is used again when the parcel that had it is gone: fresh memory costs more than the
    copy. INV: who may still read a buffer keeps its Parcel."""

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self._free: list[torch.Tensor] = []
        self._manifest: tuple[Any, Manifest, bytes] | None = None  # of the last weights, by what they are made of

    def pack(self, weights: Any, model_id: str, version: int) -> Parcel:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        problems = [f"{'.'.join(key)} {reason}" for key, tensor in tensors.items() if (reason := problem_with(tensor))]
        if problems:
            raise ManifestMismatch("these weights cannot be sent: " + "; ".join(problems) + ". Nothing was sent")
        check_keys(tensors)
        manifest, text = self._layout(tensors)
        buffer = self._take(manifest.used_bytes)
        _copy(tensors, manifest, buffer)
        parcel = Parcel(Label(Stamp(self.session, model_id, version), _kind(weights), text, extra), buffer)
        weakref.finalize(parcel, _give_back, self._free, buffer).atexit = False
        return parcel

    def _layout(self, tensors: Mapping[Key, torch.Tensor]) -> tuple[Manifest, bytes]:
        made_of = [(key, t.dtype, t.shape, t.stride(), t.data_ptr()) for key, t in tensors.items()]
        if self._manifest is None or self._manifest[0] != made_of:
            manifest = Manifest.of(tensors)
            self._manifest = made_of, manifest, manifest.to_json()
        return self._manifest[1:]

    def _take(self, size: int) -> torch.Tensor:
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes == size:
                return buffer
        return torch.empty(size, dtype=torch.uint8)


def _give_back(free: list[torch.Tensor], buffer: torch.Tensor) -> None:
    if len(free) < 2:
        free.append(buffer)


def _copy(tensors: Mapping[Key, torch.Tensor], manifest: Manifest, buffer: torch.Tensor) -> None:
    rows = []
    for leaf in {leaf.offset: leaf for leaf in manifest.leaves if leaf.nbytes}.values():
        source = tensors[leaf.key]
        if not direct(source, leaf):
            source = source.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        rows.append((source, leaf.offset, leaf.nbytes))
    if rows:
        _native.Sources([], rows).copy_to(buffer.data_ptr())


def _kind(weights: Any) -> Kind:
    if isinstance(weights, TensorDictBase):
        return "tensordict"
    return "nested" if any(isinstance(value, Mapping) for value in weights.values()) else "flat"


careful: weakref.WeakSet[Careful] = weakref.WeakSet()  # of this process


class Careful(Protocol):
    """Reads weights and does not change them."""

    def takes(self, model_id: str) -> bool:
        """Is it what the weights of this model are for?"""


def unpack(label: Label, buffer: torch.Tensor | numpy.ndarray) -> TensorDict | WeightsDict:
    """The weights that were sent, as views of the buffer, with their stamp."""
    if isinstance(buffer, numpy.ndarray) and not any(each.takes(label.stamp.model_id) for each in list(careful)):
        buffer = torch.from_numpy(buffer.copy())
    storage = (buffer if isinstance(buffer, torch.Tensor) else _as_tensor(buffer)).untyped_storage()
    views = {leaf.key: view(storage, leaf.dtype, leaf.shape, leaf.offset) for leaf in _parsed(label.manifest).leaves}
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


@lru_cache(maxsize=16)
def _parsed(text: bytes) -> Manifest:
    return Manifest.from_json(text, 2**63)


def _as_tensor(array: numpy.ndarray) -> torch.Tensor:
    """Over the array's own memory. torch.from_numpy() would warn that it is read-only, for each message anew."""
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.array = array  # type: ignore[attr-defined]  # keeps it
    return torch.frombuffer(memory, dtype=torch.uint8)


def stamp_of(weights: Any) -> Stamp | None:
    """Which weights these are, if a sender of ours sent them."""
    stamp = getattr(weights, "stamp", None)
    return stamp if isinstance(stamp, Stamp) else None
