"""The guards of a bound module, and the other proxies of its methods while it is bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..read.reading import ReadPath
from ..source.wrappers import modules_in
from .binding import Binding, companions
from .by_identity import ByIdentity
from .guard import CALL, Guard, Proxy
from .guarded_methods import GuardedCall
from .loading import Loading
from .read_guard import Cover
from .watching import watch

_covers: ByIdentity[nn.Module, Cover] = ByIdentity()


def guard_calls(
    path: ReadPath, module: nn.Module, bound: nn.Module, binding: Binding, calls: Sequence[GuardedCall], *, clones: bool
) -> None:
    """Let sections of the binding's arena cover these calls of a module, those of its other bindings too.

    Args:
        path: whose sections they are.
        module: what was passed to bind(); `bound` is the module inside its wrapper, or the same.
        calls: what to guard. Guards that are there already, for another binding, stay.
        clones: outputs that are views of the weights are cloned.
    """
    cover = _cover_of(module, bound)
    cover.drop_ended(binding.tensors())
    if not cover.members:
        _remove(cover)
    if calls:
        cover.add(path, binding, clones)
    for each in calls:
        _install(each, cover)
    for child in modules_in(bound):
        for name in ("load_state_dict", "_load_from_state_dict"):
            if not isinstance(child.__dict__.get(name), Proxy) and hasattr(child, name):
                Loading(child, name, _names_below)
        watch(child)


def withdraw_guards(module: nn.Module, bound: nn.Module) -> None:
    """Remove the guards that nothing needs: the binding they were for has failed."""
    cover = _cover_of(module, bound)
    cover.drop_ended(set())
    if not cover.members:
        _remove(cover)


def _cover_of(module: nn.Module, bound: nn.Module) -> Cover:
    """One cover for all that shares tensors or submodules with the module: their covers, made one."""
    modules = [module, *modules_in(bound), *(child for each in companions(bound) for child in each.modules())]
    covers = {cover: None for child in modules if (cover := _covers.get(child)) is not None}
    first, *others = covers or [Cover(module)]
    for other in others:
        first.absorb(other)
        for guard in list(other.guards):
            _covers[guard.module] = first
    return first


def _install(call: GuardedCall, cover: Cover) -> None:
    module, name = call
    _covers[module] = cover
    if not isinstance(module.__dict__.get(name), Guard):
        cover.guards.add(Guard(module, name, cover))
    if name == CALL:
        for hidden, kind in (("_call_impl", Hidden), ("compile", Compiling)):
            if hidden not in module.__dict__:
                kind(module, hidden)


def _remove(cover: Cover) -> None:
    """Remove the guards. One that the user has wrapped stays below its wrapper, and covers nothing."""
    for guard in list(cover.guards):
        guard.remove()
        for name in ("_call_impl", "compile"):
            standing = guard.module.__dict__.get(name)
            if isinstance(standing, (Hidden, Compiling)):
                standing.remove()


def _names_below(module: nn.Module) -> set[str]:
    return {name for binding in companions(module) for name in binding.names_below(module)}


class Hidden(Proxy):
    """Replaces `_call_impl`, unused: Dynamo, where it finds the original, goes past a module's guard."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.inner(*args, **kwargs)


class Compiling(Proxy):
    """Replaces `compile()`, which puts compiled code in the guard's place: the guard goes around that code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the module in place."""
        attributes = self.module.__dict__
        names = (CALL, "_call_impl")
        standing = {name: attributes[name] for name in names if isinstance(attributes.get(name), Proxy)}
        for each in standing.values():
            each.remove()
        try:
            self.inner(*args, **kwargs)
        finally:
            for name, each in standing.items():
                if isinstance(each, Guard):
                    each.cover.guards.add(Guard(self.module, name, each.cover))
                else:
                    Hidden(self.module, name)
