"""Binding: the parameters of a module become views of an arena.

Parameters are moved by `param.data = view`: the Parameter objects keep their identity, so tied modules, flat RNN
weights, hooks and parameter lists stay right.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from .. import _native
from ..errors import ManifestMismatch, ProtocolError
from ..memory.arena import Arena
from ..memory.manifest import Key
from ..memory.plainly import plainly
from .guard import Guard
from .matching import describe_problems, mismatches, tied_apart
from .reading import ReadPath
from .sources import EVERYTHING, collect, not_saved, unwrapped

# Which subscriber moves a submodule's tensors: the last one that bound it.
_bound_to: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ReadPath]] = weakref.WeakKeyDictionary()
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Binding:
    """The tensors of one bound module, and the views they take in each slot.

    It serves as long as any submodule lives that owns one of the tensors, even if the module passed to bind() is gone.
    It holds the submodules weakly, and so does the Subscriber: the guard holds the Subscriber, and a cycle through
    native objects would never be collected.
    """

    def __init__(
        self, module: nn.Module, arena: Arena, tensors: dict[Key, torch.Tensor], buffers: str, copies: bool
    ) -> None:
        self._arena = arena
        unique = {id(tensor): (key, tensor) for key, tensor in tensors.items()}
        self._owners = [
            weakref.ref(child)
            for child in module.modules()
            if any(id(tensor) in unique for tensor in (*child._parameters.values(), *child._buffers.values()))
        ]
        viewed = [
            (key, tensor)
            for key, tensor in unique.values()
            if not copies and (isinstance(tensor, nn.Parameter) or buffers == "view")
        ]
        self._viewed_keys = [key for key, _ in viewed]
        self._viewed = [tensor for _, tensor in viewed]
        shown = {id(tensor) for tensor in self._viewed}
        self.copied = [(key, tensor) for key, tensor in unique.values() if id(tensor) not in shown]
        self._sets: dict[int, list[torch.Tensor]] = {}
        self._placed: _native.Sources | None = None  # notices a tensor that is no longer where it was put

    def owners(self) -> set[nn.Module]:
        """The living submodules that own a bound tensor."""
        return {owner for ref in self._owners if (owner := ref()) is not None}

    def move(self, slot: int) -> bool:
        """Let the tensors show this slot; False when every owner is gone. Call it inside a section."""
        if not any(ref() is not None for ref in self._owners):
            return False
        # With one slot nothing moves, unless `.to()` or `.data =` has taken a parameter away meanwhile.
        if self._placed is None or not self._placed.revalidate() or self._placed.moved:
            views = self._sets.get(slot)
            if views is None:
                made = self._arena.views(slot)
                views = self._sets[slot] = [made[key] for key in self._viewed_keys]
            deque(map(_set_data, self._viewed, views), 0)  # 0.12 to 0.25 µs a tensor
            if self._arena.slots == 1:
                self._placed = _native.Sources([], [(tensor, 0, 0) for tensor in self._viewed])
        if self.copied:
            made = self._arena.views(slot)
            with plainly():
                for key, buffer in self.copied:
                    buffer.copy_(made[key])
        return True

    @plainly()
    def give_back(self, owners: set[nn.Module] | None = None) -> None:
        """Give parameters (of these modules only) private memory with the same values. Call it inside a section."""
        mine = None if owners is None else {id(tensor) for owner in owners for tensor in owner._parameters.values()}
        for tensor in self._viewed:
            if (mine is None or id(tensor) in mine) and self._arena.overlaps(tensor):
                tensor.data = tensor.data.clone()


@plainly()
def bind_module(
    path: ReadPath,
    module: nn.Module,
    *,
    guard: bool,
    buffers: Literal["copy", "view"],
    clone_outputs: bool,
    copies: bool = False,
    beside: Collection[Key] = (),
) -> Binding:
    """Check everything, then prepare the module. Its tensors show the arena's weights from Binding.move() on.

    Args:
        copies: parameters become private copies too, on the device they are on.
        beside: leaves of the arena that are no tensors of the module.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"bind() takes an eager torch.nn.Module, not a {type(module).__name__}")
    if buffers not in ("copy", "view"):
        raise ValueError(f'buffers is "copy" or "view", not {buffers!r}')
    arena = path.arena
    original = unwrapped(module)  # torch.compile's wrapper shows the same tensors
    _refuse_unsafe(original)
    tensors = collect(original, EVERYTHING).tensors
    private = not_saved(original)
    tensors = {key: t for key, t in tensors.items() if key in arena.manifest.by_key or key not in private}
    if arena.manifest.filtered:
        tensors = {key: tensor for key, tensor in tensors.items() if key in arena.manifest.by_key}
    meta = {key: torch.empty_like(t, device="cpu") for key, t in tensors.items() if t.device.type == "meta"}
    others = {key: arena.views(0)[key] for key in beside}
    problems = mismatches({**tensors, **meta, **others}, arena, partial=False, any_device=copies, source_is="module")
    # A cast arena accepts any floating source, but a module computes in the dtype it was built for.
    problems += [
        f"{leaf.name} is {leaf.dtype} in the arena but {tensors[leaf.key].dtype} in the module"
        for leaf in arena.manifest.leaves
        if leaf.key in tensors and leaf.cast and tensors[leaf.key].dtype != leaf.dtype
    ]
    problems = problems or tied_apart(tensors, arena, "module")
    if problems:
        raise ManifestMismatch(describe_problems(problems, f"arena {path.name!r}", "the module to bind"))
    binding = Binding(original, arena, tensors, buffers, copies)
    _take_over(module, binding.owners())  # the last step that can raise
    for key, tensor in tensors.items():
        if tensor.device.type == "meta":  # a tied one was swapped with its first key
            _materialise(tensor, meta[key])
        elif not isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.clone()  # private in any case: forward passes write buffers
    if guard:
        Guard(module, path, clone_outputs)
    for owner in binding.owners():
        _bound_to[owner] = weakref.ref(path)
    return binding


def _take_over(module: nn.Module, owners: set[nn.Module]) -> None:
    """Unbind submodules that are bound already: two subscribers would take turns in moving their tensors."""
    previous = {ref() for owner in owners if (ref := _bound_to.get(owner)) is not None}
    overlapping = [
        (path, old) for path in previous if path is not None for old in path.followers if old.owners() & owners
    ]
    for _, old in overlapping:
        if old.owners() - owners:
            raise ProtocolError(
                f"{len(old.owners() & owners)} submodule(s) of this module are bound already, as part of a larger one; "
                "bind the larger one again, or a fresh copy of this one"
            )
    for path, old in overlapping:
        path.followers.remove(old)
    for child in module.modules():
        guard = child.__dict__.get("forward")
        if isinstance(guard, Guard):
            guard.remove()


def _materialise(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a tensor of the meta device memory; the Python object stays. `.data` cannot change its device."""
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, memory)


def _refuse_unsafe(module: nn.Module) -> None:
    inductor = sys.modules.get("torch._inductor.config")
    if getattr(inductor, "freezing", False):  # patched versions of torch may lack it
        raise ProtocolError(
            "torch._inductor.config.freezing bakes the weights into compiled code, so updates would not reach it; "
            "switch it off before bind()"
        )
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            raise ProtocolError(
                f"{name or 'the module'} is an embedding with max_norm={child.max_norm}: its forward writes its weight "
                "but bound weights are read-only. Normalise in the trainer, build the worker's module without max_norm"
            )
