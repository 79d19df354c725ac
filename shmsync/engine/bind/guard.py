"""Proxies for the calls of a module, the guard that runs each of them inside a read section, and what it enters.

A call of a module goes to its `_compiled_call_impl`, if it has one, before any hook runs. A guard in that place has the
pre-hooks inside its section too (weight_norm computes the weight in one).
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from ... import _native
from ...memory.dynamo import disable, skip, with_dynamo
from ..read.outputs import private
from ..read.reading import ReadPath

CALL = "_compiled_call_impl"  # a call of the module itself


class Proxy:
    """Replaces a method of one module.

    A copy of the module (deepcopy, pickle) has the original method in this place.
    """

    def __init__(self, module: nn.Module, name: str, shows_as: bool = True) -> None:
        self.module = module
        self.method = name
        self._own = module.__dict__.get(name)  # what this object has in place of its class's method
        found = module._call_impl if name == CALL and self._own is None else getattr(module, name)
        self.inner: Callable[..., Any] = found
        if shows_as:
            _show_as(self, found)
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


def _show_as(proxy: Proxy, method: Callable[..., Any]) -> None:
    """Let it have the name and the signature of the method: callers read those of a policy."""
    attributes = vars(proxy)
    try:
        function = method.__func__  # type: ignore[attr-defined]  # has what its bound method shows, and sooner
        for name in functools.WRAPPER_ASSIGNMENTS:
            attributes[name] = getattr(function, name)
        attributes["__wrapped__"] = method
    except AttributeError:  # it is no method of Python's
        functools.update_wrapper(cast(Any, proxy), method, updated=())


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
        return self.path.run_as_is(self.run_inside, inner, args, kwargs)

    @skip
    def _finish(self, out: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What a call of these arguments returned, made fit to outlive its section. Called inside it."""
        return private(out, self.aliases, (*args, *kwargs.values())) if self._clones else out

    @disable
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


class Guard(Proxy, _native.Guard):
    """Runs each call of one method in a section of a cover. It is native: it costs 0.2 µs, a nested one 0.1."""

    def __init__(self, module: nn.Module, name: str, cover: Cover) -> None:
        _native.Guard.__init__(self)
        super().__init__(module, name)
        self._whole = isinstance(module, _compiled_types) or (name == CALL and self._own is not None)  # is it compiled?
        plain = name == "forward" and not self._whole
        of_torch = plain and (getattr(self.inner, "__module__", None) or "").startswith("torch.")
        self.entered = functools.partial(call, self.inner) if of_torch else self.inner
        self.use(cover)

    def use(self, cover: Cover) -> None:
        """Run calls in sections of this cover from now on."""
        self.cover = cover
        self.number = id(cover)  # which Dynamo can compare
        self.set_target(self.entered, cover)
        self.cover.codes[id(self.entered)] = self._compiled_frames()
        _cover_by_number[self.number] = cover

    def _compiled_frames(self) -> set[Any]:
        """The code of the frames that Dynamo may compile first when it compiles what the guard calls."""
        if self.entered is not self.inner:
            return {call.__code__}
        if self._whole:
            from torch._dynamo.external_utils import wrap_inline

            # The frame in which Dynamo compiles what is no function of the user's, such as a module of torch.nn.
            return {wrap_inline(len).__code__}
        return {getattr(getattr(self.inner, "__func__", self.inner), "__code__", None)}


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


_compiled_types: tuple[type, ...] = ()  # what torch.compile() makes of a module, once Dynamo is imported

_cover_by_number: weakref.WeakValueDictionary[int, Cover] = weakref.WeakValueDictionary()


def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `inner` from a frame that Dynamo compiles: it skips frames of torch.nn, such as Sequential's own forward."""
    return inner(*args, **kwargs)


def _in_compiled_code(self: Guard, *args: Any, **kwargs: Any) -> Any:
    """What Dynamo compiles where compiled code calls a guard."""
    if not _covered(self.number):
        torch._dynamo.graph_break()  # back to Python, where a section can be entered
    return self.inner(*args, **kwargs)


def _covered(number: int) -> bool:
    """Is the code that Dynamo compiles now a method that a guard of this cover has entered?

    Then sections cover that code whenever it runs, and the guards that it calls have nothing to do. Dynamo asks while
    it traces; the answer becomes part of the compiled code.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    cover = _cover_by_number.get(number)
    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:  # another version of torch
        return False
    return cover is not None and code in cover.codes.get(id(cover.running), ())


def _register() -> None:
    global _compiled_types
    from torch._dynamo.eval_frame import OptimizedModule

    _compiled_types = (OptimizedModule,)
    torch.compiler.assume_constant_result(_covered)
    substitute: Any = torch.compiler.substitute_in_graph(_native.Guard.__call__, skip_signature_check=True)
    substitute(_in_compiled_code)


with_dynamo(_register)
