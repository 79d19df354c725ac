"""Copies and pickles of tensors that show an arena: private memory of one version, as large as what they show.

Such a tensor is one of torch's own, over the memory of all weights. Torch would pickle all of that for each tensor, and
read it while a writer may write. So what pickle, copy and multiprocessing are to do with a tensor is registered with
them; tensors that lie elsewhere go through torch as before.

One dump or deepcopy has many tensors, and no call marks its end. Its first tensor has the whole version copied;
what the pickler keeps of each tensor until it is done keeps that copy, and the next tensor finds it.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..memory.arena import Arena, arena_around
from ..memory.devices import has_address
from ..memory.slab import slab
from ..memory.system.when_imported import when_imported
from ..memory.torch_modes import plainly, run_plainly
from .deadlines import deadline_after
from .read.reading import ReadPath
from .source.leaf_check import extent
from .write.writing import WriteSide

if TYPE_CHECKING:
    from tensordict import TensorDict

_MEMO = "shmsync"  # in the memo of a deepcopy
_threads = threading.local()


class Taken:
    """One version of an arena, or of those leaves that were asked for in a section of the caller's.

    INV: what is handed out is private, and what shared memory in the arena shares it here.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._offsets = sorted({leaf.offset for leaf in arena.manifest.leaves if leaf.nbytes})
        self._first = {leaf.offset: leaf for leaf in reversed(arena.manifest.leaves) if leaf.nbytes}
        self._leaves: dict[tuple[int, int], torch.Tensor] = {}  # by slot and place
        self._private: list[tuple[torch.Tensor, torch.Tensor]] = []  # private copies of bound modules, and their copies
        self._whole: int | None = None  # the slot, all of which was copied
        self._version = 0

    def fits(self) -> bool:
        """May it go on to serve this thread?"""
        reader = _reader(self._arena)
        if reader is not None and reader.in_section:
            return self._version == reader.held[0]
        return self._whole is not None

    def take(self) -> None:
        """Copy what must be copied now: all of the version, outside of sections."""
        reader = _reader(self._arena)
        side = None if self._arena.writer is None else cast("WriteSide | None", self._arena.writer())
        if reader is not None and reader.in_section:
            self._version = reader.held[0]
            self._take_private(reader)
        elif reader is not None:
            reader.run_as_is(self._take_all, reader)
        elif side is not None and side.updating_thread != threading.get_ident():
            with side.lock:
                side.ready(deadline_after(None, side.timeout))
                self._take_slot(side.current[1])

    @run_plainly
    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, over the private copy."""
        if not tensor.numel():
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        address = tensor.data_ptr()
        around = tensor.untyped_storage().data_ptr()
        begin, end = next((span for span in self._arena.spans() if span[0] <= around < span[1]), (0, 0))
        if begin <= address < end:
            slot, place = divmod(address - begin, self._arena.manifest.slot_bytes)
            reader = _reader(self._arena)
            if self._whole is not None:
                slot = self._whole
            elif reader is not None and reader.in_section:
                slot = reader.held[1]
            elif reader is not None or self._arena.writer is None:
                return tensor.clone()  # the Subscriber has gone over to another arena
            offset = self._offsets[bisect_right(self._offsets, place) - 1]
            base, ahead = self._leaf(slot, offset), place - offset
        else:
            of, base = next(
                (pair for pair in self._private if pair[0].data_ptr() <= address < pair[0].data_ptr() + pair[0].nbytes),
                (tensor, tensor.clone()),  # bound since
            )
            ahead = address - of.data_ptr()
        size = tensor.element_size()
        if ahead + extent(tensor) * size > base.untyped_storage().nbytes():
            return tensor.clone()  # a view of several leaves
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            base.untyped_storage(), ahead // size, tensor.size(), tensor.stride()
        )
        made = made.conj() if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made

    @run_plainly
    def _leaf(self, slot: int, offset: int) -> torch.Tensor:
        known = self._leaves.get((slot, offset))
        if known is None:
            known = self._leaves[slot, offset] = self._arena.views(slot)[self._first[offset].key].clone()
        return known

    def _take_all(self, reader: ReadPath) -> None:
        if reader.arena is not self._arena:  # entering the section has moved it to another one
            return
        self._take_slot(reader.held[1])
        self._take_private(reader)
        self._version = reader.held[0]

    def _take_slot(self, slot: int) -> None:
        self._leaves.clear()  # a torn section is repeated
        for offset in self._offsets:
            self._leaf(slot, offset)
        self._whole = slot

    @run_plainly
    def _take_private(self, reader: ReadPath) -> None:
        copies = [tensor for each in reader.followers for tensor in each.private_copies()]
        self._private = [(tensor, tensor.clone()) for tensor in copies if has_address(tensor) and tensor.numel()]


def _reader(arena: Arena) -> ReadPath | None:
    reader = None if arena.reader is None else cast("ReadPath | None", arena.reader())
    return reader if reader is not None and reader.arena is arena else None


def _of_arena(tensor: torch.Tensor) -> Arena | bool:
    """The arena whose memory, or private copy of a buffer, it shows. True: that of an arena that was closed here."""
    try:
        if tensor.layout is not torch.strided or not has_address(tensor) or tensor.is_nested:
            return False
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper without memory
        return False
    return arena_around(tensor, address) or slab.is_mapped(address)


def _taken(arena: Arena, memo: dict[Any, Any] | None) -> Taken:
    """The version that this dump, or the deepcopy of this memo, copies."""
    if memo is not None:
        known: Any = memo.setdefault(_MEMO, weakref.WeakKeyDictionary())
        taken = known.get(arena)
    else:
        known = _threads.__dict__.setdefault("taken", weakref.WeakKeyDictionary())
        reference = known.get(arena)
        taken = None if reference is None else reference()
    if taken is None or not (memo is not None or taken.fits()):
        taken = Taken(arena)
        taken.take()
        known[arena] = taken if memo is not None else weakref.ref(taken)
    return taken


def _made(tensor: torch.Tensor, memo: dict[Any, Any] | None = None) -> tuple[torch.Tensor, Taken | None] | None:
    """A private copy of the same kind, and what holds its version; None: the tensor is no view of an arena."""
    arena = _of_arena(tensor)
    taken = None
    if isinstance(arena, Arena):
        taken = _taken(arena, memo)
        made = taken.copied(tensor)
    elif arena:
        with plainly():
            made = tensor.clone()
    else:
        return None
    if type(tensor) is nn.Parameter:
        return nn.Parameter(made, tensor.requires_grad), taken
    return made.requires_grad_(tensor.requires_grad), taken


def _reduced(tensor: torch.Tensor, reduce: Callable[[Any], Any]) -> Any:
    found = _made(tensor)
    if found is None:
        return reduce(tensor)
    made, taken = found
    vars(made).update(vars(tensor))
    reduced = reduce(made)
    _keep(made)
    if taken is not None:
        for carrier in _carriers(reduced[1]):
            weakref.finalize(carrier, _let_go, taken).atexit = False
    return reduced


def _reduced_storage(storage: torch.UntypedStorage, reduce: Callable[[Any], Any]) -> Any:
    if storage.device.type != "cpu" or not slab.is_mapped(storage.data_ptr()):
        return reduce(storage)
    made = storage.clone()
    _keep(made)
    return reduce(made)


def _keep(made: torch.Tensor | torch.UntypedStorage) -> None:
    """Until a process is started: the number of the copy's descriptor is passed on when all is pickled."""
    popen = get_spawning_popen()
    if popen is not None:
        vars(popen).setdefault("_shmsync_copies", []).append(made)


def _let_go(taken: Taken) -> None:
    pass


def _carriers(args: tuple[Any, ...]) -> list[Any]:
    """What a pickler keeps of a tensor until it is done: a separate storage object, or a Parameter's data."""
    found = []
    for each in args:
        if type(each) is tuple:
            found += _carriers(each)
        elif isinstance(each, (torch.TypedStorage, torch.Tensor)):
            found.append(each)
    return found


def _deepcopied(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    found = _made(tensor, memo) if tensor.is_leaf else None
    if found is None:
        return cast(torch.Tensor, tensor.__deepcopy__(memo))
    made = found[0]
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    vars(made).update(copy.deepcopy(vars(tensor), memo))
    memo[id(tensor)] = made
    return made


def _deepcopied_levels(weights: TensorDict, memo: dict[Any, Any]) -> Any:
    """A TensorDict deep-copies itself as clone() does, each tensor at its own time."""
    leaves = weights.values(include_nested=True, leaves_only=True)
    if not any(isinstance(leaf, torch.Tensor) and _of_arena(leaf) for leaf in leaves):
        return weights.__deepcopy__(memo)
    made = weights.apply(lambda leaf: copy.deepcopy(leaf, memo))
    memo[id(weights)] = made
    return made


def _deepcopy_levels(table: dict[type, Any]) -> None:
    from tensordict import TensorDict

    from ..memory.dotted import DottedTensorDict

    table.update(dict.fromkeys((TensorDict, DottedTensorDict), _deepcopied_levels))


@functools.cache
def copy_by_value() -> None:
    """From now on, copies and pickles of arenas' tensors in this process are private copies of one version."""
    table = getattr(copy, "_deepcopy_dispatch", None)  # deepcopy() asks no copyreg, but the object itself
    if table is not None:
        table.update({torch.Tensor: _deepcopied, nn.Parameter: _deepcopied})
        when_imported("shmsync.memory.dotted", functools.partial(_deepcopy_levels, table))  # wherever tensordict is
    for kind in (torch.Tensor, nn.Parameter):
        usual = copyreg.dispatch_table.get(kind, _as_torch)
        copyreg.pickle(kind, functools.partial(_reduced, reduce=usual))
        sent = ForkingPickler._extra_reducers[kind]  # type: ignore[attr-defined]
        ForkingPickler.register(kind, functools.partial(_reduced, reduce=sent))
    sent = ForkingPickler._extra_reducers[torch.UntypedStorage]  # type: ignore[attr-defined]
    ForkingPickler.register(torch.UntypedStorage, functools.partial(_reduced_storage, reduce=sent))


def _as_torch(tensor: torch.Tensor) -> Any:
    return tensor.__reduce_ex__(2)
