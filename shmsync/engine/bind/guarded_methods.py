"""Which calls of a bound module are guarded."""

from __future__ import annotations

import inspect
from functools import partialmethod, singledispatchmethod
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import ProtocolError
from ..source.leaf_check import is_tensordict
from ..source.wrappers import modules_in

CALL = "_compiled_call_impl"  # a call of the module itself


class GuardedCall(NamedTuple):
    """A method of a module; CALL is the call of the module itself."""

    module: nn.Module
    method: str


def calls_of(module: nn.Module) -> list[GuardedCall]:
    """Each call of the module or of a submodule, and each public method that a class of the user's own defines.

    Such a class is no part of torch. A module that only holds parameters has none. Raises ProtocolError for a call that
    cannot be guarded.
    """
    _refuse_own_call(module)
    found = []
    for child in modules_in(module):
        if isinstance(child, torch.jit.ScriptModule):
            continue
        methods = own_methods(child)
        for name in methods:
            _refuse_coroutine(child, name)
        if type(child).forward is not nn.Module.forward or "forward" in vars(child):
            found.append(GuardedCall(child, CALL))
            # Programs rarely call the forward() of a layer of torch directly. A guard would cost each call of the layer
            # 0.1 µs.
            if child is module or not _of_torch(type(child)):
                found.append(GuardedCall(child, "forward"))
        found += [GuardedCall(child, name) for name in methods]
    return found


def own_methods(module: nn.Module) -> list[str]:
    """The public methods that the classes of a module define, those of torch apart, in the order of their definition.

    What nn.Module has too (train(), state_dict(), ...) does not count, nor do class methods, static methods and
    properties, nor what an object has as an attribute of its own.
    """
    if is_tensordict(module):  # data: TensorDictParams
        return []
    names: dict[str, None] = {}
    for kind in reversed(type(module).__mro__):
        if not _of_torch(kind):
            names.update(dict.fromkeys(name for name, value in vars(kind).items() if _is_method(name, value)))
    return [name for name in names if name in vars(module) or _is_method(name, inspect.getattr_static(module, name))]


def _is_method(name: str, value: Any) -> bool:
    if name.startswith("_") or hasattr(nn.Module, name):
        return False
    if isinstance(value, (type, staticmethod, classmethod, property)):
        return False
    return isinstance(value, (partialmethod, singledispatchmethod)) or (callable(value) and hasattr(value, "__get__"))


def _of_torch(kind: type) -> bool:
    return kind is object or kind.__module__ == "torch" or kind.__module__.startswith("torch.")


def _refuse_own_call(module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if "__call__" in vars(kind) and not _of_torch(kind):
            raise ProtocolError(
                f"{kind.__name__} defines __call__() itself, which Python looks up in the class: it cannot be guarded "
                "for one object. Call it forward(), or use bind(guard=False) and `with sub.read():`"
            )


def _refuse_coroutine(module: nn.Module, name: str) -> None:
    method = inspect.unwrap(getattr(module, name))
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise ProtocolError(
            f"{type(module).__name__}.{name}() is a coroutine function: at each await other code of its thread runs, "
            "so no read section can cover it. Make the part that uses the weights a plain method, and the coroutine a "
            "function outside the class, or use bind(guard=False) and `with sub.read():`"
        )
