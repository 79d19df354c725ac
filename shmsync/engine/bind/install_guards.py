"""bind(): a module's tensors and its guards, together or not at all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TypeVar

from torch import nn

from ..by_identity import ByIdentity
from ..read.reading import ReadPath
from ..source.wrappers import modules_in
from .binding import Binding, taken_over
from .guard import CALL, Compiling, Cover, Guard, Hidden
from .guarded_methods import GuardedCall, GuardNames, calls_of
from .module_check import ModuleCheck, bindable
from .replaced_methods import replace_methods

M = TypeVar("M", bound=nn.Module)

_covers: ByIdentity[nn.Module, Cover] = ByIdentity()


def bind(
    reader: ReadPath,
    module: M,
    guard: GuardNames,
    check: ModuleCheck,
    *,
    clones: bool,
    instead_of: ReadPath | None = None,
) -> M:
    """As Subscriber.bind(); `check` says how the tensors of the module move.

    `instead_of`: the reader that the module may be bound to now, and leaves.
    """
    bound = bindable(module)
    calls = calls_of(module, guard)
    # No call is under way while the tensors change hands.
    with reader.hold_lock(), nullcontext() if instead_of is None else instead_of.hold_lock():
        reader.followers[:] = [each for each in reader.followers if not isinstance(each, Binding) or each.owners()]
        tensors = check.tensors(bound)
        replaced = taken_over(bound, tensors, reader, instead_of)
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
        cover = _cover_of(module, bound)
        try:
            cover.enter(reader if calls else None, clones=clones)
            for call in calls:
                _install(call, cover)
            if not calls:
                _remove(cover)
            replace_methods(bound)
        except BaseException:
            binding.drop()
            binding.release()
            cover.enter(None, clones=False)
            _remove(cover)
            raise
    return module


def _cover_of(module: nn.Module, bound: nn.Module) -> Cover:
    """The cover of this module. It takes over the guards that earlier calls of bind() have put into its parts.

    Another module's guards keep their own cover: they raise ClosedError where that is of a closed Subscriber.
    """
    inside = {id(each): each for each in (module, *modules_in(module), *modules_in(bound))}
    earlier = {cover: None for each in inside.values() if (cover := _covers.get(each)) is not None}
    cover = next((each for each in earlier if each.is_of(module)), None) or Cover(module)
    for other in earlier:
        for guard in list(other.guards) if other is not cover else ():
            if id(guard.module) in inside:
                other.guards.discard(guard)
                cover.guards.add(guard)
                guard.use(cover)
                _covers[guard.module] = cover
    return cover


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
    """Remove the guards of a cover that covers nothing. One that the user has wrapped stays below its wrapper."""
    for guard in list(cover.guards):
        guard.remove()
        for name in ("_call_impl", "compile"):
            standing = guard.module.__dict__.get(name)
            if isinstance(standing, (Hidden, Compiling)):
                standing.remove()
