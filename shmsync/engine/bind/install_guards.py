"""bind(), and the guards and other proxies of a bound module's methods."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

from torch import nn

from ..by_identity import ByIdentity
from ..read.reading import ReadPath
from ..source.wrappers import modules_in
from .binding import Binding, bound_elsewhere, companions, taken_over
from .guard import CALL, Guard, Proxy
from .guarded_methods import GuardedCall, GuardNames, calls_of
from .module_check import ModuleCheck, bindable
from .read_guard import Cover
from .watching import Loading, unguarded_loads, watch

M = TypeVar("M", bound=nn.Module)

_covers: ByIdentity[nn.Module, Cover] = ByIdentity()


def bind(reader: ReadPath, module: M, guard: GuardNames, check: ModuleCheck, *, clones: bool) -> M:
    """As Subscriber.bind(); `check` says how the tensors of the module move.

    Guards that are there already, for another binding, stay.
    """
    bound = bindable(module)
    calls = calls_of(module, guard)
    with ExitStack() as stack:
        for path in (reader, *bound_elsewhere(bound, reader)):  # no call is under way while the tensors change hands
            stack.enter_context(path.hold_lock())
        reader.followers[:] = [each for each in reader.followers if not isinstance(each, Binding) or each.owners()]
        tensors = check.tensors(bound)
        replaced = taken_over(bound, tensors)
        for old in replaced:
            old.drop()  # it may fit no more, which would be an error at the entry of the section
        had_used = reader.has_used_version
        try:
            with reader.read() if reader.applied_version else nullcontext():
                binding = Binding(reader, bound, check, tensors)
                if reader.applied_version:
                    binding.move(reader.held_slot)
                reader.followers.append(binding)
        except BaseException:
            for old in replaced:
                old.restore()
            raise
        finally:
            if not had_used:  # the section is no use of this thread's: `version` goes on with what is applied
                reader.forget_used_version()
        try:
            cover = _cover_of(module, bound, binding.tensors())
            if calls:
                cover.add(reader, binding, clones)
            for call in calls:
                _install(call, cover)
            modules = list(modules_in(bound))
            for child, name in unguarded_loads(modules):
                Loading(child, name)
            for child in modules:
                watch(child)
        except BaseException:
            binding.drop()
            binding.release()
            _cover_of(module, bound, set())  # without guards of this one
            raise
    return module


def _cover_of(module: nn.Module, bound: nn.Module, tensors: set[int]) -> Cover:
    """One cover for everything that shares tensors or submodules with the module: their covers, made one.

    It is without the bindings that have ended; with none left, its guards are removed. `tensors`: ids of those that are
    bound now.
    """
    modules = [module, *modules_in(bound), *(child for each in companions(bound) for _, child in each.living())]
    covers = {cover: None for child in modules if (cover := _covers.get(child)) is not None}
    first, *others = covers or [Cover(module)]
    for other in others:
        first.absorb(other)
        for guard in list(other.guards):
            _covers[guard.module] = first
    first.drop_ended(tensors)
    if not first.members:
        _remove(first)
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
