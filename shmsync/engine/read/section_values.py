"""What a read section hands out beside its TensorDict: stamps of versions, numpy arrays, and private copies.

snapshot() and state_dict() copy inside a section; run() in reading.py repeats one that was torn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import _native
from ...errors import ProtocolError
from ...memory.arena import Arena, nested
from ...memory.devices import assign
from ...memory.manifest import Key, Manifest
from ...memory.torch_modes import plainly

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class VersionStamp(NamedTuple):
    """Which weights a read section used. Equal for two sections that used the same version of the same publisher.

    Attributes:
        session: the random id of the publisher's life; empty before the section was entered.
        version: the number of the version.
    """

    session: bytes
    version: int


def arrays_of(tensors: Mapping[Key, torch.Tensor]) -> dict[str, Any]:
    """The leaves by dotted key, as numpy arrays over the same memory that numpy refuses to write.

    Raises ProtocolError for leaves that are not in the host's memory, and for a dtype that numpy lacks.
    """
    arrays = {}
    for key, leaf in tensors.items():
        name = ".".join(key)
        try:
            array = arrays[name] = leaf.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise ProtocolError(
                f"{name!r} is {leaf.dtype} on {leaf.device}, which numpy cannot show: {error}. Use section.weights, or "
                "publish it with dtype= and device=None"
            ) from error
        array.setflags(write=False)  # for good: the memory is not numpy's own, so numpy never allows writes again
    return arrays


class _OfVersion(NamedTuple):
    weights: TensorDictBase
    version: int


class Snapshot(_OfVersion):
    """A private, consistent copy of the weights, and their version.

    Attributes:
        weights: the copy; a leaf has its key path or its dotted key.
        version: the version that was copied.
    """

    _unsaved: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tensors: Mapping[Key, torch.Tensor], version: int, manifest: Manifest) -> Snapshot:
        """The snapshot of a version whose leaves a `manifest` lists."""
        from ...memory.dotted import dotted

        made = cls(dotted(nested(tensors)), version)
        made._unsaved = frozenset(leaf.name for leaf in manifest.leaves if not leaf.saved)
        return made

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The leaves by dotted key, for torch.save() and load_state_dict(): the same tensors as in `weights`.

        It has the leaves that the published module's own state_dict() has.
        """
        leaves = self.weights.items(include_nested=True, leaves_only=True)
        named = {key if isinstance(key, str) else ".".join(key): leaf for key, leaf in leaves}
        return {name: leaf for name, leaf in named.items() if name not in self._unsaved}


def copied(arena: Arena, slot: int) -> dict[Key, torch.Tensor]:
    """Each leaf of a slot in new private memory. Call it where the slot is not written, or in a section.

    Each leaf has its own storage, so that one that is kept, pickled or shared takes no others along.
    """
    leaves, device = arena.manifest.leaves, arena.torch_device
    with plainly():
        made = {
            leaf.key: torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device) for leaf in leaves
        }
        if arena.device_slab is not None:
            for key, view in arena.views(slot).items():
                assign(made[key], view)
            return made
    source = arena.readonly_range()[0] + slot * arena.manifest.slot_bytes
    _native.copy([(made[leaf.key].data_ptr(), source + leaf.offset, leaf.nbytes) for leaf in leaves if leaf.nbytes])
    return made


def state_of(weights: Mapping[Key, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The leaves that a state_dict() of the published module has: all but buffers that are never saved.

    Leaves that are one tensor in the arena are one tensor here, so that a file has them once.
    """
    made: dict[object, torch.Tensor] = {}
    state = {}
    for leaf in manifest.leaves:
        if leaf.saved:
            place = (leaf.offset, leaf.dtype, leaf.shape, leaf.strides) if leaf.nbytes else leaf.key
            state[leaf.name] = made.setdefault(place, weights[leaf.key])
    return state


def copied_state(arena: Arena, slot: int) -> dict[str, torch.Tensor]:
    """A private copy of a slot that is not written meanwhile, complete when this returns."""
    state = state_of(copied(arena, slot), arena.manifest)
    if arena.device_slab is not None:  # the next publish may write on another stream
        device = arena.device_slab.device
        device.wait(device.current(), float("inf"))
    return state
