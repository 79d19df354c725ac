"""Proxies for the calls of a module, and the guard that runs each of them inside a read section.

A call of a module goes to its `_compiled_call_impl`, if it has one, before any hook runs. A guard in that place has the
pre-hooks inside its section too (weight_norm computes the weight in one).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ... import _native
from ...memory.dynamo import with_dynamo
from .read_guard import Cover

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
