"""Binding: the parameters of a module become views of an arena.

Parameters are moved by `param.data = view`: the Parameter objects keep their identity, so tied modules, flat RNN
weights, hooks and parameter lists stay right. With one slot they stay where they are, so a new version moves nothing
but buffers: they are private copies, are put back where something has replaced them, and get the version's values.
Parameters that a worker replaces one by one are not noticed (docs/limits.md).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from ... import _native
from ...errors import ProtocolError
from ...memory.arena import Arena
from ...memory.devices import assign, has_address, laid_out
from ...memory.manifest import Key
from ...memory.torch_modes import counts_changes, modes_are_on, plainly, run_plainly
from ..read.reading import ReadPath
from .module_check import ModuleCheck, materialise, placed_modules

# Kept alive by their Subscriber alone: they hold views, and so the slab.
_made: weakref.WeakSet[Binding] = weakref.WeakSet()


class Binding:
    """The tensors of one bound module, and the views they take in each slot.

    It serves as long as any submodule lives that owns one of the tensors, even if the module passed to bind() is gone.
    It holds the submodules weakly, and so does the Subscriber: the guard holds the Subscriber, and a cycle through
    native objects would never be collected.

    Args:
        path: moves it, once it is one of its followers: the tensors show the arena's weights from move() on.
        module: whose tensors are bound.
        fitting: which of them are views, and of which leaves.
        tensors: what fitting.tensors() has given for the module.
        replaced: the bindings that end, as taken_over() has them; not if this one cannot be made.
    """

    def __init__(
        self,
        path: ReadPath,
        module: nn.Module,
        fitting: ModuleCheck,
        tensors: dict[Key, torch.Tensor],
        replaced: Iterable[Binding] = (),
    ) -> None:
        self.path, self._name = weakref.ref(path), path.name
        self._fitting = fitting
        self._arena: Arena = path.arena
        self._root = weakref.ref(module)
        self._places: list[tuple[Key, weakref.ref[nn.Module]]] = []
        self._tensors: dict[Key, torch.Tensor] = {}
        self._viewed: list[torch.Tensor] = []
        self.copied: list[tuple[Key, torch.Tensor]] = []
        self._empty = list(fitting.empty.items())  # the first move fills them
        self.ended = False
        with plainly():
            fitting.refuse_views(module, tensors)
            materialise(module, (*tensors.values(), *fitting.empty.values()), path.arena.device)
            for old in replaced:
                old.drop()
            self.take(tensors, placed_modules(module))
        _made.add(self)

    @property
    def serves(self) -> bool:
        """False when another binding has taken over, or the Subscriber is closed or gone."""
        path = self.path()
        return path is not None and self in path.followers

    def living(self) -> list[tuple[Key, nn.Module]]:
        """The living modules below the bound one, itself included, with their key paths."""
        return [(path, module) for path, ref in self._places if (module := ref()) is not None]

    def owners(self) -> set[nn.Module]:
        """The living submodules that own a bound tensor."""
        mine = self.tensors()
        return {
            owner
            for _, owner in self.living()
            if any(id(tensor) in mine for tensor in (*owner._parameters.values(), *owner._buffers.values()))
        }

    def tensors(self) -> set[int]:
        """The ids of the tensors that it moves."""
        return {id(tensor) for tensor in self._tensors.values()}

    def owned(self) -> set[int]:
        """The ids of the tensors that its modules own now."""
        return {id(tensor) for _, tensor in own_tensors(self.living())}

    def is_of(self, module: nn.Module) -> bool:
        """Was it made for this module?"""
        return self._root() is module

    def take(self, tensors: dict[Key, torch.Tensor], places: Sequence[tuple[Key, nn.Module]]) -> None:
        """From now on move these tensors; `places`: all modules that may own some, with their key paths."""
        self._tensors = dict(tensors)
        leaf_of = self._fitting.leaf_of
        unique = {id(tensor): (leaf_of(key), tensor) for key, tensor in tensors.items()}
        viewed = {key: pair for key, pair in unique.items() if self._fitting.viewed(pair[1])}
        self.copied = [pair for key, pair in unique.items() if key not in viewed]
        self._places = [(path, weakref.ref(module)) for path, module in places]
        by_key = self._arena.manifest.by_key
        for leaf, tensor in self.copied:  # forward passes write buffers
            make_private(tensor, by_key[leaf].strides)
        stores = {
            id(tensor): (module._buffers, name)
            for _, module in places
            for name, tensor in module._buffers.items()
            if tensor is not None and type(module._buffers) is dict
        }
        self._buffers = _native.BufferCopies(
            [(*stores.get(id(tensor), (None, "")), tensor, by_key[leaf].offset) for leaf, tensor in self.copied]
        )
        self._counted = [tensor for _, tensor in self.copied if counts_changes(tensor)]
        self._viewed_keys = [leaf for leaf, _ in viewed.values()]
        self._viewed = [tensor for _, tensor in viewed.values()]
        self._sets: dict[int, list[torch.Tensor]] = {}
        self._placed = False  # with one slot: nothing has to move
        path = self.path()
        if path is not None:
            others = [each for each in path.followers if each is not self]
            copies = [tensor for each in (*others, self) for tensor in each.private_copies()]
            placed = [tensor for tensor in copies if has_address(tensor) and tensor.numel()]
            path.set_copies([(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in placed])
            path.order_copies(copies)

    def rebase(self, arena: Arena) -> None:
        """From the next move() on, show this arena, which has the same leaves."""
        self._arena = arena
        self._fitting.arena = arena
        self._sets.clear()
        self._placed = False

    def prepare(self) -> None:
        """Put buffers back that were replaced, before anything moves.

        Raises ProtocolError when parameters were taken out of the arena, or when a graph is being captured that private
        copies would become part of.
        """
        if self.copied:
            if (path := self.path()) is not None:
                path.streams.refuse_capture()
            self._buffers.put_back()
        if self._placed and self._viewed and self._viewed[0].data_ptr() != self._address:
            raise ProtocolError(
                "the parameters of a bound module were given other memory, as by `param.data =`, so they do not show "
                f"arena {self._name!r} any more; convert the module before bind(), or bind it again"
            )

    def move(self, slot: int) -> bool:
        """Let the tensors show this slot; False when every owner is gone. Call it inside a section."""
        if self._root() is None and not any(ref() is not None for _, ref in self._places):
            return False
        if not self._placed:
            with plainly() if modes_are_on() else nullcontext():
                views = self._sets.get(slot)
                if views is None:
                    made = self._arena.views(slot)
                    views = self._sets[slot] = [made[key] for key in self._viewed_keys]
                _native.set_data(self._viewed, views)  # 0.1 to 0.2 µs a tensor
                if self._arena.slots == 1:
                    self._address = views[0].data_ptr() if views else 0
                    self._placed = True
        if self.copied or self._empty:
            self._renew_copies(slot)
        torch.clear_autocast_cache()  # what was computed from the version before
        if (parametrize := sys.modules.get("torch.nn.utils.parametrize")) is not None:
            parametrize._cache.clear()
        return True

    def _renew_copies(self, slot: int) -> None:
        """Renew the private copies, after what earlier sections have asked a device for with the old ones."""
        if self._arena.on_device is None and self._buffers.renew(self._arena.readonly_address(slot)):
            torch.autograd.graph.increment_version(self._counted)  # as copy_() does, for autograd's checks
            copies = []
        else:
            copies = self.copied
        if copies or self._empty:
            made = self._arena.views(slot)
            path = self.path()
            with nullcontext() if path is None else path.renewing_copies(), plainly():
                for key, buffer in (*copies, *self._empty):
                    assign(buffer, made[key])
            self._empty.clear()

    def private_copies(self) -> list[torch.Tensor]:
        """The tensors that a move copies into."""
        return [tensor for _, tensor in self.copied]

    @run_plainly
    def release(self, owners: set[nn.Module] | None = None) -> None:
        """Give parameters (of these modules only) private memory with the same values. Call it inside a section."""
        mine = None if owners is None else {id(tensor) for owner in owners for tensor in owner._parameters.values()}
        for tensor in self._viewed:
            if (mine is None or id(tensor) in mine) and self._arena.overlaps(tensor):
                make_private(tensor)
        self._placed = False

    def drop(self) -> None:
        """Move nothing any more: another binding takes over."""
        self.ended = True
        path = self.path()
        if path is not None and self in path.followers:
            path.followers.remove(self)

    def restore(self) -> None:
        """Undo drop(): the other one failed."""
        path = self.path()
        if self.ended and path is not None:
            self.ended = False
            path.followers.append(self)


def own_tensors(places: Iterable[tuple[Key, nn.Module]]) -> Iterator[tuple[Key, torch.Tensor]]:
    """The tensors that modules own themselves, with their key paths; `places`: the modules, with theirs."""
    for path, module in places:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (*path, name), tensor


def bound_to(module: nn.Module) -> list[Binding]:
    """The bindings that move tensors of this module, of a part of it, or of one that it is a part of."""
    mine = {id(tensor) for _, tensor in own_tensors(placed_modules(module))}
    return [each for each in list(_made) if each.serves and not mine.isdisjoint(each.tensors() | each.owned())]


def bound_tensors(module: nn.Module) -> set[int]:
    """The ids of the tensors that those bindings move."""
    return {each for binding in bound_to(module) for each in binding.tensors()}


def taken_over(module: nn.Module, tensors: Mapping[Key, torch.Tensor], *readers: ReadPath | None) -> list[Binding]:
    """The bindings of these readers that end if these tensors of the module are bound.

    Raises ProtocolError if the module shares tensors with one that another Subscriber moves.
    """
    mine = {id(tensor) for tensor in tensors.values()}
    replaced = []
    for old in bound_to(module):
        path = old.path()
        if path is not None and path not in readers:
            raise ProtocolError(
                f"this module, or one that shares tensors with it, is bound to arena {path.name!r}. Close that "
                "Subscriber first, or bind a fresh copy. For one module in several parts use one arena of a "
                "torch.nn.ModuleDict, and publish() a part"
            )
        if old.is_of(module) or not old.tensors() - mine:
            replaced.append(old)
        elif common := old.tensors() & mine:
            raise ProtocolError(
                f"{len(common)} tensor(s) of this module are bound already, as part of a larger binding; bind the "
                "larger one again, or a fresh copy of this module"
            )
    return replaced


def make_private(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> None:
    """Give a tensor private memory, with the same values; in the order of these strides."""
    with plainly():
        own = tensor.data.clone()
        tensor.data = own if strides is None else laid_out(own, strides)
