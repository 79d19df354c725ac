"""snapshot() and state_dict(): one version, copied into private memory: into which, and what is kept of it.

Subscriber copies inside a section. reading.py, _computed(), repeats a section that was torn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ... import _native
from ...memory.arena import Arena, lies_in, readonly_ranges
from ...memory.devices import assign
from ...memory.manifest import Key, Leaf, Manifest
from ...memory.snapshot_memory import Pieces
from ...memory.torch_modes import count_change, plainly
from ..by_identity import ByIdentity
from ..source.leaf_check import is_tensordict, problem_with
from ..source.manifest_check import direct
from ..source.sources import EVERYTHING, collect
from ..source.targets import collisions, made_anew, problem_with_target

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Ranges: TypeAlias = list[tuple[int, int]]  # of addresses, [begin, end)


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
    def of(cls, weights: TensorDictBase, version: int, manifest: Manifest) -> Snapshot:
        """The snapshot of a version whose leaves a `manifest` lists."""
        made = cls(weights, version)
        made._unsaved = frozenset(leaf.name for leaf in manifest.leaves if not leaf.saved)
        return made

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The leaves by dotted key, for torch.save() and load_state_dict(): the same tensors as in `weights`.

        It has the leaves that the published module's own state_dict() has.
        """
        leaves = self.weights.items(include_nested=True, leaves_only=True)
        named = {key if isinstance(key, str) else ".".join(key): leaf for key, leaf in leaves}
        return {name: leaf for name, leaf in named.items() if name not in self._unsaved}


class Targets:
    """The memory that a snapshot is copied into, all checked; None: new memory.

    Raises ValueError for an `out` that does not fit, TypeError for one that is no TensorDict; nothing was written.

    Attributes:
        new: a tensor for each leaf of the manifest, where they are new memory.
    """

    def __init__(self, out: TensorDictBase | None, arena: Arena) -> None:
        self.table: _native.Sources | None = None  # of an `out` that can be found again, see targets_for()
        self._direct: list[tuple[torch.Tensor, Leaf]] = []
        self._others: list[tuple[torch.Tensor, Leaf]] = []
        self._pieces: Pieces | None = None  # of new memory
        self.new: list[torch.Tensor] = []
        if out is None:
            pieces, self.new = arena.fresh.make()
            if arena.on_device is None:
                self._pieces = pieces
            else:
                self._others = list(zip(self.new, arena.manifest.leaves, strict=True))
            return
        if not is_tensordict(out):
            raise TypeError(f"out is a TensorDict with the arena's keys, not a {type(out).__name__}")
        with plainly():
            own, readonly = arena.ranges(), readonly_ranges()
            collected = collect(out, EVERYTHING, to_write=True)
            found: dict[Key, Any] = {leaf.key: collected.tensors.get(leaf.key) for leaf in arena.manifest.leaves}
            # Its dicts cannot be seen: it may create its leaves at each access.
            again = found if collected.watched_dicts is not None else collect(out, EVERYTHING, to_write=True).tensors
            problems = [
                f"{leaf.name} of out {problem}"
                for leaf in arena.manifest.leaves
                if (problem := _problem(found[leaf.key], again.get(leaf.key), leaf, own, readonly))
            ]
            problems = problems or collisions(found, {leaf.key: leaf.offset for leaf in arena.manifest.leaves})
            if problems:
                raise ValueError("out does not fit; nothing was written: " + "; ".join(problems))
            for leaf in arena.manifest.leaves:
                tensor = found[leaf.key]
                by_address = arena.on_device is None and direct(tensor, leaf)
                (self._direct if by_address else self._others).append((tensor, leaf))
            if collected.watched_dicts is not None and not self._others:
                rows = [(tensor, leaf.offset, leaf.nbytes) for tensor, leaf in self._direct]
                self.table = _native.Sources(collected.watched_dicts, rows)

    def unchanged(self) -> bool:
        """Has nothing changed since these were checked? Memory that has not moved lies in no arena made since."""
        return self.table is not None and self.table.revalidate() and not self.table.moved

    def copy(self, arena: Arena, slot: int) -> None:
        """Copy this slot into them. The arena has the same leaves: it may have taken the other one's place."""
        source = arena.readonly_range()[0] + slot * arena.manifest.slot_bytes
        if self._pieces is not None:
            _native.copy([(to, source + offset, size) for to, offset, size in self._pieces])
            return
        if self.table is not None:
            self.table.copy_from(source)
        elif self._direct:
            _native.copy([(t.data_ptr(), source + leaf.offset, leaf.nbytes) for t, leaf in self._direct])
        with plainly():
            # Autograd's checks see these writes too; an inference tensor has nothing that they could be wrong for.
            count_change([target for target, _ in self._direct])
            if self._others:
                views = arena.views(slot)
                for target, leaf in self._others:
                    assign(target, views[leaf.key])


KeptTargets: TypeAlias = "ByIdentity[TensorDictBase, Targets]"


def targets_for(out: TensorDictBase | None, arena: Arena, kept: KeptTargets) -> Targets:
    """The checked targets for `out`, kept as long as it lives; raises as Targets does.

    Most programs reuse one `out`, and it is not checked leaf by leaf again. What was found out about it holds while its
    dicts have the same tensors, and those are as they were, which one native call sees (native/bind/sources.hpp).
    The plan cache of a publisher cannot hold them: a subscriber has none, and these are targets, with other checks.
    """
    if out is None:
        return Targets(None, arena)
    known = kept.get(out)
    if known is not None and known.unchanged():
        return known
    kept.pop(out)  # its table has addresses by now that were not checked
    made = Targets(out, arena)
    if made.unchanged():  # the first look at it, to compare with
        kept[out] = made
    return made


def _problem(target: Any, again: Any, leaf: Leaf, own: Ranges, readonly: Ranges) -> str | None:
    """Why a leaf cannot be copied there, or None."""
    if target is None:
        return f"is missing, but the arena has it as {leaf.dtype} {leaf.shape}"
    if (problem := problem_with(target)) is not None:
        return problem
    if lies_in(target, own):
        return "lies in the arena itself; pass memory of yours"
    if lies_in(target, readonly):
        return "lies in an arena, which is read-only here; pass memory of yours"
    if problem := problem_with_target(target) or made_anew(target, again):
        return problem
    if tuple(target.shape) != leaf.shape or target.dtype != leaf.dtype:
        return f"is {target.dtype} {tuple(target.shape)} but {leaf.dtype} {leaf.shape} in the arena"
    if target.is_conj() or target.is_neg():
        return "is lazily conjugated or negated; pass its resolve_conj().resolve_neg()"
    return None


def state_of(
    weights: Mapping[Key, torch.Tensor],
    manifest: Manifest,
    copied: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[str, torch.Tensor]:
    """The leaves that a state_dict() of the published module has: all but buffers that are never saved.

    Leaves that are one tensor in the arena are one tensor here, so that a file has them once.
    """
    made: dict[object, torch.Tensor] = {}
    state = {}
    for leaf in manifest.leaves:
        if leaf.saved:
            place = (leaf.offset, leaf.dtype, leaf.shape, leaf.strides) if leaf.nbytes else leaf.key
            if place not in made:
                made[place] = copied(weights[leaf.key])
            state[leaf.name] = made[place]
    return state


def copied_state(arena: Arena, slot: int) -> dict[str, torch.Tensor]:
    """A private copy of a slot that is not written meanwhile, complete when this returns."""
    with plainly():
        state = state_of(arena.views(slot), arena.manifest, torch.Tensor.clone)
    if arena.on_device is not None:  # the next publish may write on another stream
        device = arena.on_device.device
        device.wait(device.current(), float("inf"))
    return state
