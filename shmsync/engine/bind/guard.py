"""bind(): a module's tensors show an arena, and guards run its calls inside read sections.

A call of a module goes to its `_compiled_call_impl`, if it has one, before any hook runs. A guard in that place has the
pre-hooks inside its section too (weight_norm computes the weight in one).
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ... import _native
from ...errors import ProtocolError
from ...memory.manifest import Key
from ..read.outputs import private
from ..read.reading import ReadPath
from ..source.leaf_check import is_a
from ..source.wrappers import modules_in
from .binding import Binding, bindable, bound_to, fit_of, taken_over
from .compiled import call, covers, disable, first_frames, skip
from .guarded_methods import CALL, GuardedCall

M = TypeVar("M", bound=nn.Module)


def bind(
    reader: ReadPath,
    module: M,
    calls: Sequence[GuardedCall],
    *,
    clones: bool = True,
    copies: bool = False,
    absent: Collection[Key] = (),
    prefix: Key = (),
) -> M:
    """As Subscriber.bind(), with these calls guarded. `clones`: clone_outputs; `copies`, `absent`: as in fit_of()."""
    bound = bindable(module)
    # No call is under way while the tensors change hands.
    with reader.hold_lock():
        reader.followers[:] = [each for each in reader.followers if each.owners()]
        fit = fit_of(bound, reader.arena, reader.name, copies=copies, absent=absent, prefix=prefix)
        replaced = taken_over(bound, fit, reader)
        before = list(reader.followers)
        # What fits no more would be an error at the entry of the section.
        reader.followers[:] = [each for each in before if each not in replaced]
        had_used = reader.has_used_version
        try:
            with reader.read() if reader.applied_version else nullcontext():
                binding = Binding(reader, bound, fit)
                if reader.applied_version:
                    binding.move(reader.held_slot)
                reader.add_follower(binding)
        except BaseException:
            reader.followers[:] = before
            raise
        finally:
            if not had_used:  # the section is no use of this thread's: `version` goes on with what is applied
                reader.forget_used_version()
        cover = _cover_of(module, bound)
        cover.enter(reader if calls else None, clones=clones)
        for owner, name in calls:
            _install(owner, name, cover)
        if not calls:
            _remove(cover)
        for each in modules_in(bound):
            hooks = [getattr(hook, "hook", None) for hook in each._load_state_dict_pre_hooks.values()]
            if _refuse_load not in hooks and not isinstance(each, torch.jit.ScriptModule):  # which takes no hook
                each.register_load_state_dict_pre_hook(_refuse_load)
    return module


def _refuse_load(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """A hook of load_state_dict(). Raises ProtocolError before bound tensors of this module would be written."""
    shown = {each for binding in bound_to(module) for each in binding.tensors()}
    named = (*module._parameters.items(), *module._buffers.items())
    refused = [prefix + name for name, each in named if id(each) in shown and prefix + name in state_dict]
    if refused:
        raise ProtocolError(
            f"load_state_dict() would write {', '.join(refused)} of a bound module, which show an arena that is "
            "read-only here. Load into the trainer's module and publish it, or load into copy.deepcopy(module)"
        )


class Proxy:
    """Replaces a method of one module.

    A copy of the module (deepcopy, pickle) has the original method in this place.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.method = name
        self._own = module.__dict__.get(name)  # what this object has in place of its class's method
        found = module._call_impl if name == CALL and self._own is None else getattr(module, name)
        self.inner: Callable[..., Any] = found
        functools.update_wrapper(cast(Any, self), found, updated=())  # callers read the signature of a policy
        module.__dict__[name] = self

    def remove(self) -> None:
        """Give the module its own method back."""
        attributes = self.module.__dict__
        if attributes.get(self.method) is self:
            if self._own is None:
                del attributes[self.method]
            else:
                attributes[self.method] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.inner,)


def _itself(method: Any) -> Any:
    return method


class Cover(_native.Cover):
    """Shared by all guards of a module and of its submodules.

    `run()` is native. It enters a section, calls, looks at what comes out, and leaves. A call inside such a call is
    nested, and costs next to nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self.path: ReadPath | None = None
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.codes: dict[int, set[Any]] = {}  # of the frames that Dynamo compiles first, by what a guard calls
        self._clones = False

    def is_of(self, module: nn.Module) -> bool:
        """Was it made for this module?"""
        return self._module() is module

    def enter(self, path: ReadPath | None, *, clones: bool) -> None:
        """Enter sections of this subscriber from now on; None: of none. A call that waits to enter does so too.

        `clones`: outputs that are views of the weights are cloned.
        """
        self.path = path
        self._clones = clones
        plain = path is None or not path.optimistic  # no call is ever repeated, so all of it can be native
        self.set_reader(path, plain, clones)
        if path is not None:
            path.covers.add(self)

    # What the native half calls. Dynamo skips these frames, and compiles the module's own below them.

    @skip
    def _repeat(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call as run() of an optimistic subscriber does: again, if the section was torn."""
        if self.path is None:
            return inner(*args, **kwargs)
        return self.path.run(self.run_inside, inner, args, kwargs)[0]

    @skip
    def _finish(self, out: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What a call of these arguments returned, made fit to outlive its section. Called inside it."""
        return private(out, self.aliases, (*args, *kwargs.values())) if self._clones else out

    def _look(self) -> None:
        """Warn, on the first call with gradients on, that they may come out wrong."""
        if self.path is not None and self.path.in_section:
            return  # the caller's section may well cover the backward pass
        self.gradients_checked = True
        module = self._module()
        if module is None or not any(p.requires_grad for p in module.parameters()):
            return
        warnings.warn(
            "a bound module ran with gradients on: if the weights change before backward(), the gradients are wrong. "
            "Put forward and backward in one `with sub.read():`, or use torch.no_grad()",
            stacklevel=3,
        )


disable(Cover, "_look")


class Guard(Proxy, _native.Guard):
    """Runs each call of one method in a section of a cover. It is native: a call runs no Python of ours."""

    def __init__(self, module: nn.Module, name: str, cover: Cover) -> None:
        _native.Guard.__init__(self)
        super().__init__(module, name)
        self._whole = is_a(module, "torch._dynamo.eval_frame", "OptimizedModule")
        self._whole |= name == CALL and self._own is not None  # is it compiled?
        plain = name == "forward" and not self._whole
        of_torch = plain and (getattr(self.inner, "__module__", None) or "").startswith("torch.")
        self.entered = functools.partial(call, self.inner) if of_torch else self.inner
        self.use(cover)

    def use(self, cover: Cover) -> None:
        """Run calls in sections of this cover from now on."""
        self.cover = cover
        cover.guards.add(self)
        self.number = id(cover)  # which Dynamo can compare
        self.set_target(self.entered, self.inner, cover)
        cover.codes[id(self.entered)] = first_frames(self.entered, self.inner, whole=self._whole)
        covers[self.number] = cover


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
                    Guard(self.module, name, each.cover)
                else:
                    Hidden(self.module, name)


def _cover_of(module: nn.Module, bound: nn.Module) -> Cover:
    """The cover of this module. It takes over the guards that earlier calls of bind() have put into its parts.

    Another module's guards keep their own cover: they raise ClosedError where that is of a closed Subscriber.
    """
    inside = {id(each): each for each in (module, *modules_in(module), *modules_in(bound))}
    guards = [each for part in inside.values() for each in vars(part).values() if isinstance(each, Guard)]
    cover = next((each.cover for each in guards if each.cover.is_of(module)), None) or Cover(module)
    for each in guards:
        each.use(cover)
    return cover


def _install(module: nn.Module, name: str, cover: Cover) -> None:
    if not isinstance(module.__dict__.get(name), Guard):
        Guard(module, name, cover)
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
