"""Binding: the parameters of a module become views of an arena, once it is seen to fit.

Parameters are moved by `param.data = view`: the Parameter objects keep their identity, so tied modules, flat RNN
weights, hooks and parameter lists stay right. With one slot they stay where they are, so a new version moves nothing
but buffers: they are private copies, are put back where something has replaced them, and get the version's values.
Parameters that a worker replaces one by one are not noticed (docs/limits.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import to_dlpack

from ... import _native
from ...errors import ManifestMismatch, ProtocolError
from ...memory.arena import Arena
from ...memory.devices import assign, has_address, holding, laid_out
from ...memory.manifest import Key
from ...memory.torch_modes import counts_changes, plainly, run_plainly
from ..converting import Crossing
from ..read.reading import ReadPath
from ..source.leaf_check import is_wrapper
from ..source.manifest_check import (
    describe_problems,
    dtype_cure,
    elsewhere,
    mismatches,
    overlapping,
    second_names,
    tied_apart,
)
from ..source.sources import collect, not_saved
from ..source.wrappers import modules_in, respelled, unwrapped, without

# Kept alive by their Subscriber alone: they hold views, and so the slab.
_made: weakref.WeakSet[Binding] = weakref.WeakSet()


class Binding(_native.Follower):
    """The tensors of one bound module, and the views they take in each slot.

    It serves as long as any submodule lives that owns one of the tensors, even if the module passed to bind() is gone.
    It holds the submodules weakly, and so does the Subscriber: the guard holds the Subscriber, and a cycle through
    native objects would never be collected.

    Args:
        path: moves it, once it is one of its followers: the tensors show the arena's weights from move() on.
        module: whose tensors are bound.
        fit: they, and the leaves that they show.
    """

    def __init__(self, path: ReadPath, module: nn.Module, fit: Fit) -> None:
        self.path, self._name = weakref.ref(path), path.name
        self._arena: Arena = path.arena
        self._root, modules = weakref.ref(module), modules_in(module)
        # Which tensors it moves, a tied one once, and which modules own them.
        leaves = {id(tensor): (leaf, tensor) for leaf, tensor in fit.moved}
        viewed = [pair for pair in leaves.values() if fit.viewed(pair[1])]
        self._viewed_keys, self._viewed = [leaf for leaf, _ in viewed], [tensor for _, tensor in viewed]
        self.copied = [pair for pair in leaves.values() if not fit.viewed(pair[1])]
        self.buffers = [tensor for _, tensor in self.copied]  # private copies: forward passes write them
        self._empty = list(fit.empty)  # the first move fills them
        bound = leaves.keys() | {id(tensor) for _, tensor in fit.empty}
        self._owners = [weakref.ref(each) for each in modules if not bound.isdisjoint(map(id, _held_by(each)))]
        # They get the memory that moves need.
        with plainly():
            materialise(module, [tensor for _, tensor in (*fit.moved, *fit.empty)], path.arena.torch_device)
            for leaf, tensor in self.copied:
                make_private(tensor, self._arena.manifest.by_key[leaf].strides)
            counted = [tensor for tensor in self.buffers if counts_changes(tensor)]
        super().__init__(self._root, self._viewed, *self._first_place(modules), self._copies_in(modules), counted)
        # How private copies on a device are renewed.
        self._counts_all = len(counted) == len(self.copied)
        devices = {tensor.device: tensor for tensor in self.buffers if tensor.device.type not in ("cpu", "meta")}
        self._devices = [(holding(tensor), device) for device, tensor in devices.items()]
        self._crossing: Crossing | None = None
        self._buffer_references = references_to(self.buffers)
        self._view_references: list[Any] = []
        _made.add(self)

    def _first_place(self, modules: Iterable[nn.Module]) -> tuple[dict[str, Any], str]:
        """Where a module holds the first parameter: a conversion to another device puts another one there."""
        for each in modules:
            for name, parameter in each._parameters.items():
                if self._viewed and parameter is self._viewed[0]:
                    return each._parameters, name
        return {}, ""

    def _copies_in(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any] | None, str, torch.Tensor, int]]:
        """Of each private copy: the dict that owns it, if that is a plain one, its name there, it, and its offset."""
        stores: dict[int, tuple[dict[str, Any] | None, str]] = {
            id(tensor): (each._buffers, name)
            for each in modules
            if type(each._buffers) is dict
            for name, tensor in each._buffers.items()
        }
        by_key = self._arena.manifest.by_key
        return [(*stores.get(id(tensor), (None, "")), tensor, by_key[leaf].offset) for leaf, tensor in self.copied]

    def private_ranges(self) -> list[tuple[int, int]]:
        """[begin, end) of the memory of its private copies."""
        placed = [tensor for tensor in self.buffers if has_address(tensor) and tensor.numel()]
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in placed]

    def owners(self) -> set[nn.Module]:
        """The living submodules that own a bound tensor."""
        return {owner for ref in self._owners if (owner := ref()) is not None}

    def tensors(self) -> set[int]:
        """The ids of the tensors that it moves."""
        return {id(tensor) for tensor in (*self._viewed, *self.buffers)}

    def is_of(self, module: nn.Module) -> bool:
        """Was it made for this module?"""
        return self._root() is module

    def rebase(self, arena: Arena) -> None:
        """From the next move() on, show this arena, which has the same leaves."""
        self._arena = arena
        self.forget()
        self._view_references.clear()

    def prepare(self) -> None:
        """Put buffers back that were replaced, before anything moves.

        Raises ProtocolError when parameters were taken out of the arena, or when a graph is being captured that private
        copies would become part of.
        """
        if self.copied:
            for known, _ in self._devices:
                if known is not None and known.capturing(known.current()):
                    raise ProtocolError(
                        "a graph is being captured, and the module has buffers or other private copies that a newer "
                        "version has to be copied into; nothing was changed, begin the capture inside a read section"
                    )
            self.put_back()
        if not self.in_place():
            raise ProtocolError(
                "the parameters of a bound module were given other memory, as by half(), to() or `param.data =`, so "
                f"they do not show arena {self._name!r} any more; convert the module before bind(), or bind it again"
            )

    def move(self, slot: int) -> bool:
        """Let the tensors show this slot; False when every owner is gone. Call it inside a section."""
        if self._root() is None and not self.owners():
            return False
        if not self.knows(slot):
            made, on_host = self._arena.views(slot), self._arena.device_slab is None
            address = self._arena.readonly_address(slot) if on_host else 0
            views = [made[key] for key in self._viewed_keys]
            self.learn(slot, views, address)
            if self._arena.slots > 1:  # each version points the parameters at other ones
                self._view_references += references_to(views)
        self.show(slot)
        if self.copied or self._empty:
            self._renew_copies(slot)
        self.simple = not (self._devices or self._empty) and self._arena.device_slab is None
        return True

    def _renew_copies(self, slot: int) -> None:
        """Renew the private copies. Devices are waited for: before, since earlier sections may still read the old ones.

        And after, since the section may end, and the next one begin, on another stream than the current one.
        """
        copies = [] if self._arena.device_slab is None and self.renew(slot) else self.copied
        if copies or self._empty:
            made = self._arena.views(slot)
            self._synchronize()
            with plainly():
                crossing = self._crossing_of(copies)
                if crossing is not None:
                    views = [made[key] for key, _ in copies]
                    crossing.to_device(self._arena.readonly_address(slot), views, [tensor for _, tensor in copies])
                    copies = []
                for key, buffer in (*copies, *self._empty):
                    assign(buffer, made[key])
            self._synchronize()
            self._empty.clear()

    def _crossing_of(self, copies: list[tuple[Key, torch.Tensor]]) -> Crossing | None:
        """How the device of all these copies fetches them from the host's memory by itself; None: it does not."""
        if self._arena.device_slab is not None or len(self._devices) != 1 or not self._counts_all:
            return None
        (device, place), by_key = self._devices[0], self._arena.manifest.by_key
        if device is None or any(tensor.device != place for _, tensor in copies) or self._arena.pin(device) is None:
            return None
        if self._crossing is None:
            pairs = [(tensor, by_key[key]) for key, tensor in copies]
            self._crossing = Crossing(pairs, range(len(pairs)), device)
        return self._crossing

    def _synchronize(self) -> None:
        for _, device in self._devices:
            torch.get_device_module(device).synchronize(device)

    @run_plainly
    def release(self, owners: set[nn.Module] | None = None) -> None:
        """Give parameters (of these modules only) private memory with the same values. Call it inside a section."""
        mine = None if owners is None else {id(tensor) for owner in owners for tensor in owner._parameters.values()}
        for tensor in self._viewed:
            if (mine is None or id(tensor) in mine) and self._arena.overlaps(tensor):
                make_private(tensor)
        self.hide()

    def follow(self, on: bool) -> None:
        """Move with each version, or not any more."""
        path = self.path()
        if path is not None and (self in path.followers) is not on:
            path.add_follower(self) if on else path.followers.remove(self)


@run_plainly
def references_to(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """References of torch's own to tensors of the host, beside Python's, for those that live as long anyway.

    Where only Python refers to a tensor, torch 2.13 takes the GIL for each look at it: 140 ns instead of 35.
    """
    found = []
    for tensor in tensors:
        if tensor.device.type == "cpu":
            with suppress(RuntimeError, BufferError):  # a dtype that DLPack lacks
                found.append(to_dlpack(tensor))
    return found


def _held_by(module: nn.Module) -> tuple[torch.Tensor | None, ...]:
    return (*module._parameters.values(), *module._buffers.values())


def bound_to(module: nn.Module) -> list[Binding]:
    """The bindings that move tensors of this module, of a part of it, or of one that it is a part of."""
    mine = {id(tensor) for each in modules_in(module) for tensor in _held_by(each)}
    serving = [each for each in list(_made) if (path := each.path()) is not None and each in path.followers]
    return [each for each in serving if not mine.isdisjoint(each.tensors())]


def taken_over(module: nn.Module, fit: Fit, reader: ReadPath) -> list[Binding]:
    """The bindings of this reader that end if these tensors of the module are bound.

    Raises ProtocolError if the module shares tensors with one that another Subscriber moves.
    """
    mine = {id(tensor) for _, tensor in fit.moved}
    replaced = []
    for old in bound_to(module):
        path = old.path()
        if path is not None and path is not reader:
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


class Fit(NamedTuple):
    """The tensors of a module that fit an arena, with the leaves that they show.

    Attributes:
        moved: those that move with the version.
        empty: buffers in no state_dict(), on the meta device: the first version fills them.
        copies: parameters are private copies too, as buffers are.
    """

    moved: list[tuple[Key, torch.Tensor]]
    empty: list[tuple[Key, torch.Tensor]]
    copies: bool

    def viewed(self, tensor: torch.Tensor) -> bool:
        """Does this tensor show the arena's memory? Else it is a private copy."""
        return not self.copies and isinstance(tensor, nn.Parameter)


@run_plainly
def fit_of(
    module: nn.Module,
    arena: Arena,
    name: str,
    *,
    copies: bool = False,
    absent: Collection[Key] = (),
    prefix: Key = (),
) -> Fit:
    """The tensors of a module that move with the version. Raises ManifestMismatch when it does not fit.

    Buffers that are in no state_dict() are the module's own.

    Args:
        module: it is not changed.
        arena, name: what it is to be bound to.
        copies: parameters become private copies too, as buffers are, on the device they are on.
        absent: leaves of the arena that are no tensors of the module.
        prefix: the module's leaves are those below this key path.
    """
    refuse_max_norm(
        module,
        "but bound weights are read-only. Normalise in the trainer, build the worker's module without max_norm",
    )
    leaves = arena.manifest.by_key
    found = {(*prefix, *key): tensor for key, tensor in collect(module).items()}
    lazy = [".".join(key) for key, each in found.items() if is_lazy(each)]
    if lazy:
        raise ProtocolError(f"{lazy[0]} is not initialised yet, in a lazy module; run it once before binding it")
    unsaved = found.keys() & {(*prefix, *key) for key in not_saved(module)}
    unsaved |= {key for key, leaf in leaves.items() if not leaf.saved}
    empty = {key: tensor for key, tensor in found.items() if key in unsaved and tensor.is_meta}
    for key in empty:
        if key not in leaves:
            raise ManifestMismatch(
                f"{'.'.join(key)} is on the meta device, and arena {name!r} cannot fill it: a state_dict() "
                "has no buffers with persistent=False. Publish the module itself, or give the buffer values first"
            )
    saved = without(leaves, unsaved)
    tensors = respelled(without(found, unsaved), saved)
    second = second_names(tensors, saved)
    own = without(tensors, second)
    if arena.manifest.filtered:
        own = {key: tensor for key, tensor in own.items() if key in saved}
    outside = {key for key in leaves if key[: len(prefix)] != prefix}
    _refuse_misfit(own | empty, arena, name, beside={*absent, *unsaved, *outside}, copies=copies)
    moved = [*own.items(), *((first, tensors[key]) for key, first in second.items())]
    refuse_views({".".join(key): tensor for key, tensor in found.items()}, {id(tensor) for _, tensor in moved})
    return Fit(moved, list(empty.items()), copies)


def _refuse_misfit(
    tensors: Mapping[Key, torch.Tensor], arena: Arena, name: str, *, beside: Collection[Key], copies: bool
) -> None:
    """Raise ManifestMismatch when these cannot show what the arena has under their keys, or leave one out.

    `beside`: leaves that are no tensors of the module.
    """
    meta = {key: t for key, t in tensors.items() if t.device.type == "meta" and not is_wrapper(t)}
    proxies = {key: torch.empty_like(t, device="cpu") for key, t in meta.items()}
    given = {**{key: view for key, view in arena.views(0).items() if key in beside}, **tensors, **proxies}
    problems = mismatches(given, arena, partial=False, source_is="module")
    if not copies:
        problems += [f"{each}; move it there" for each in elsewhere(tensors, arena)]
    problems = problems or tied_apart(tensors, arena, "module")
    if problems:
        cure = dtype_cure(given, arena, problems)
        if any(key not in arena.manifest.by_key for key in given):
            cure += "\nTo publish a part of a model, make it from the model: Publisher(model, include=[...])."
        raise ManifestMismatch(describe_problems(problems, f"arena {name!r}", "the module to bind") + cure)


def refuse_views(named: Mapping[str, torch.Tensor], moving: set[int]) -> None:
    """Raise ManifestMismatch for one of these tensors that shares memory with one that moves away from it, by id."""
    for one, two in overlapping(named, moving):
        if (id(named[one]) in moving) != (id(named[two]) in moving):
            view, parameter = (two, one) if id(named[one]) in moving else (one, two)
            raise ManifestMismatch(
                f"{view} is a view of {parameter}, which moves with each version, while the "
                "view would keep old values; nothing was changed. Take the view in forward(), or register the "
                "buffer with persistent=True, which publishes it"
            )


def bindable(module: nn.Module) -> nn.Module:
    """The module whose tensors are bound: that inside a wrapper, such as torch.compile's."""
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        several = "; put several modules into one torch.nn.ModuleDict({...})" if isinstance(module, dict) else ""
        raise TypeError(f"bind() takes an eager torch.nn.Module, not a {type(module).__name__}{several}")
    return unwrapped(module)


def materialise(module: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give ordinary memory to those of the tensors that are on the meta device, or were made in inference mode.

    `.data` cannot change a tensor's device. With ordinary memory in a tensor that was made in inference mode, torch
    would take it for an ordinary one and miss the counter of its changes. The Python objects stay, with their class and
    attributes, so whatever else holds them has the memory too. Call it inside plainly(). Raises ProtocolError for a
    tensor that torch cannot give memory to; nothing was changed then.
    """
    without = {id(each): each for each in tensors if each.device.type == "meta" or not counts_changes(each)}
    if not without:
        return
    recurrent = [each for each in modules_in(module) if isinstance(each, nn.RNNBase)]
    memories = [(tensor, _memory_for(tensor, device)) for tensor in without.values()]
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in recurrent:  # torch swaps no tensor with weak references; RNNBase._apply() drops its own in this way too
        each._flat_weights, each._flat_weight_refs = [], []
    try:
        for tensor, memory in memories:
            torch.utils.swap_tensors(tensor, memory)
            done.append((tensor, memory))
    except RuntimeError as error:
        for swapped in done:
            torch.utils.swap_tensors(*swapped)
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        name = next(name for name, each in named if each is tensor)
        meta = tensor.device.type == "meta"
        what = "is on the meta device" if meta else "was made in inference mode"
        cure = f"Make the module on {device}: its values need not be set" if meta else (
            "Make the module outside of torch.inference_mode(); its calls may be inside"
        )  # fmt: skip
        raise ProtocolError(
            f"{name} {what} and cannot be given other memory, since something else refers to it, such as a weak "
            f"reference or a tensor that was computed from it ({error}); nothing was changed. {cure}"
        ) from error
    finally:
        for each in recurrent:
            each._init_flat_weights()


def _memory_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    memory.__class__ = tensor.__class__  # a swap exchanges these two as well
    memory.__dict__.update(tensor.__dict__)
    return memory


def refuse_max_norm(module: nn.Module, otherwise: str) -> None:
    """Raise ProtocolError for an embedding whose forward writes its weight. `otherwise`: why not, and the cure."""
    for child in modules_in(module):
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            name = next(name for name, each in module.named_modules() if each is child)
            raise ProtocolError(
                f"{name or 'the module'} is an embedding with max_norm={child.max_norm}: its forward writes its weight "
                + otherwise
            )
