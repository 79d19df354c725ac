"""Weights on their way: one flat buffer, laid out as a slot of an arena is, and a label that says which weights it has.

The buffer is a private copy, so the trainer may go on while it travels, and a resend brings it again. pickle's own
buffers would be one for each tensor, and torch.distributed sends one tensor.
"""

from __future__ import annotations

import secrets
import weakref
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from ... import _native
from ...engine.source.manifest_check import direct
from ...engine.source.sources import check_keys
from ...memory.arena import nested, view
from ...memory.devices import laid_out
from ...memory.manifest import Key, Manifest
from ...memory.segment import Handle
from ...memory.torch_modes import run_plainly
from ..strategy import STATE_KEY, leaves_of, refuse_odd

_PIECE = 8 << 20  # bytes; a larger leaf is a piece of its own


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
    """Weights in a buffer. Unpickles as the weights themselves, with `.label`: views of what was received.

    It is pickled in pieces. An engine makes memory for each tensor that comes, and what is larger than 32 MB the system
    maps anew for each send, page by page, which takes as long as the bytes do.
    """

    def __init__(self, label: Label, manifest: Manifest, buffer: torch.Tensor) -> None:
        self.label, self.manifest, self.buffer = label, manifest, buffer

    @run_plainly
    def __reduce__(self) -> tuple[Any, ...]:
        starts = [0]
        for offset, size in sorted(self.manifest.places.items()):
            if starts[-1] < offset and offset + size - starts[-1] > _PIECE:
                starts.append(offset)
        pieces = [self.buffer]
        if len(starts) > 1:  # each has its own storage: RPC clones a tensor that is a small part of one
            spans, memory = zip(starts, [*starts[1:], self.buffer.nbytes], strict=True), self.buffer.numpy()
            pieces = [torch.frombuffer(memory, dtype=torch.uint8, offset=a, count=b - a) for a, b in spans]
        return unpack, (self.label, self.manifest, *pieces)


@run_plainly
def unpack(label: Label, manifest: Manifest, *pieces: torch.Tensor) -> Any:
    """The weights that were sent, as a TensorDict or a dict, with their label.

    Their tensors are views of the buffer; of its pieces, if these end where leaves begin.
    """
    starts = [0, *accumulate(piece.nbytes for piece in pieces[:-1])]
    views = {}
    for leaf in manifest.leaves:
        number = bisect_right(starts, leaf.offset) - 1
        views[leaf.key] = view(pieces[number].untyped_storage(), leaf, leaf.offset - starts[number])
    weights: Any = nested(views)
    if not label.is_tensordict:
        weights = WeightsDict(state_dict_of(views, label))
    weights.label = label
    return weights


def state_dict_of(leaves: dict[Key, torch.Tensor], label: Label) -> dict[str, Any]:
    """Leaves, and the extra state of their label, as a state_dict() has them."""
    named: dict[str, Any] = {".".join(key): leaf for key, leaf in leaves.items()}
    return named | {".".join((*path, STATE_KEY)): state for path, state in label.extra.items()}


class Packer:
    """Packs weights, into the same buffer as long as nobody reads that: fresh memory costs more than the copy.

    INV: a reader of a buffer keeps its PackedWeights.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self.newest: PackedWeights | None = None  # what resend() brings
        self._free: deque[torch.Tensor] = deque(maxlen=1)
        self._laid_out: tuple[Any, Manifest] | None = None  # the last weights, by what they are made of

    @run_plainly
    def pack(self, weights: Any, model_id: str, version: int) -> PackedWeights:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        refuse_odd(tensors)
        check_keys(tensors)
        made_of = [(key, t.dtype, t.shape, t.stride(), t.data_ptr()) for key, t in tensors.items()]
        if self._laid_out is None or self._laid_out[0] != made_of:
            self._laid_out = made_of, Manifest.of(tensors)
        manifest = self._laid_out[1]
        self.newest = None  # its buffer is free now, unless somebody reads it
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes != manifest.used_bytes:
            buffer = torch.empty(manifest.used_bytes, dtype=torch.uint8, device="cpu")
        rows, kept = [], []
        for leaf in {leaf.offset: leaf for leaf in manifest.leaves if leaf.nbytes}.values():
            source = tensors[leaf.key]
            if not direct(source, leaf):
                source = laid_out(source.detach().cpu().resolve_conj().resolve_neg(), leaf.strides)
            kept.append(source)  # until it is copied
            rows.append((buffer.data_ptr() + leaf.offset, source.data_ptr(), leaf.nbytes))
        _native.copy(rows)
        label = Label(self.session, model_id, version, isinstance(weights, TensorDictBase), extra)
        self.newest = PackedWeights(label, manifest, buffer)
        weakref.finalize(self.newest, self._free.append, buffer).atexit = False
        return self.newest
