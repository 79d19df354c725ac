"""Weights on their way: one flat buffer, laid out as a slot of an arena is, and a label that says which weights it has.

The buffer is a private copy, so the trainer may go on while it travels, and a resend brings it again. pickle's own
buffers would be one for each tensor, and torch.distributed sends one tensor.
"""

from __future__ import annotations

import secrets
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from ...engine.source.sources import check_keys
from ...memory.arena import nested, view
from ...memory.manifest import Key, Manifest
from ...memory.segment import Handle
from ...memory.torch_modes import run_plainly
from ..strategy import STATE_KEY, Fit, leaves_of, refuse_odd, write


class Label(NamedTuple):
    """Which weights these are."""

    session: str  # of the sender; another trainer begins its versions again
    model_id: str
    version: int
    is_tensordict: bool  # else they unpickle as a flat dict
    extra: dict[Key, Any]  # what modules keep beside their tensors


class News(NamedTuple):
    """A version that lies in an arena of the worker's node. WeightReceiver.apply_weights() takes it like weights."""

    label: Label
    handle: Handle


class WeightsDict(dict[str, Any]):
    """A state_dict that came from a sender."""

    label: Label


class PackedWeights:
    """Weights in a buffer. Unpickles as the weights themselves: views of the received buffer, with `.label`."""

    def __init__(self, label: Label, manifest: Manifest, buffer: torch.Tensor) -> None:
        self.label, self.manifest, self.buffer = label, manifest, buffer

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.label, self.manifest, self.buffer)


@run_plainly
def unpack(label: Label, manifest: Manifest, buffer: torch.Tensor) -> Any:
    """The weights that were sent, as a TensorDict or a dict of views of the buffer, with their label."""
    views = _views(manifest, buffer)
    weights: Any = nested(views)
    if not label.is_tensordict:
        weights = WeightsDict(state_dict_of(views, label))
    weights.label = label
    return weights


def state_dict_of(leaves: dict[Key, torch.Tensor], label: Label) -> dict[str, Any]:
    """Leaves, and the extra state of their label, as a state_dict() has them."""
    named: dict[str, Any] = {".".join(key): leaf for key, leaf in leaves.items()}
    return named | {".".join((*path, STATE_KEY)): state for path, state in label.extra.items()}


def _views(manifest: Manifest, buffer: torch.Tensor) -> dict[Key, torch.Tensor]:
    storage = buffer.untyped_storage()
    return {leaf.key: view(storage, leaf, leaf.offset) for leaf in manifest.leaves}


class Packer:
    """Packs weights, into the same buffer as long as nobody reads that: fresh memory costs more than the copy.

    INV: a reader of a buffer keeps its PackedWeights.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self.newest: PackedWeights | None = None  # what resend() brings
        self._free: deque[torch.Tensor] = deque(maxlen=1)

    @run_plainly
    def pack(self, weights: Any, model_id: str, version: int) -> PackedWeights:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        refuse_odd(tensors)
        check_keys(tensors)
        manifest = Manifest.of(tensors)
        self.newest = None  # its buffer is free now, unless somebody reads it
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes != manifest.used_bytes:
            buffer = torch.empty(manifest.used_bytes, dtype=torch.uint8, device="cpu")
        places = _views(manifest, buffer)
        once = {leaf.offset: leaf.key for leaf in manifest.leaves if leaf.nbytes}  # tied leaves share a place
        write(Fit([(tensors[key].detach(), places[key]) for key in once.values()], []))
        label = Label(self.session, model_id, version, isinstance(weights, TensorDictBase), extra)
        self.newest = PackedWeights(label, manifest, buffer)
        weakref.finalize(self.newest, self._free.append, buffer).atexit = False
        return self.newest
