"""Which calls of a bound module are guarded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partialmethod, singledispatchmethod
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...errors import ProtocolError
from ..source.leaf_check import is_tensordict
from ..source.wrappers import modules_in

CALL = "_compiled_call_impl"  # a call of the module itself

GuardNames: TypeAlias = bool | Sequence[str]


class GuardedCall(NamedTuple):
    """A method of a module; CALL is the call of the module itself."""

    module: nn.Module
    method: str


def calls_of(module: nn.Module, guard: GuardNames) -> list[GuardedCall]:
    """The calls to guard; [] for False. Raises ValueError, TypeError or ProtocolError for what cannot be guarded.

    True: each call of the module or of a submodule, and each public method that a class of the user's own (one that is
    no part of torch) defines. A list: the methods and submodules that it names, with dotted names.
    """
    if isinstance(guard, bool):
        found = _all(module) if guard else []
        if guard and not found:
            raise ProtocolError(
                f"no call of this {type(module).__name__} can be guarded: it has no forward(), no submodule and no "
                "method of its own. Use bind(module, guard=False), and put what uses it in `with sub.read():`"
            )
        return found
    if not isinstance(guard, (list, tuple)):
        raise TypeError(f'guard is True, False or a list of names such as ["act", "actor"], not {guard!r}')
    if not guard:
        raise ValueError("guard=[] names nothing to guard; pass guard=False if that is meant")
    return [call for name in guard for call in _named(module, name)]


def can_be_called(module: nn.Module) -> bool:
    """Has it a call that can be guarded? Not so a module that only holds parameters."""
    return any(_has_forward(child) or own_methods(child) for child in modules_in(module))


def _all(module: nn.Module) -> list[GuardedCall]:
    _refuse_own_call(module)
    found = []
    for child in modules_in(module):
        if isinstance(child, torch.jit.ScriptModule):
            continue
        methods = own_methods(child)
        for name in methods:
            _refuse_coroutine(child, name)
        if _has_forward(child):
            found.append(GuardedCall(child, CALL))
            # Programs rarely call the forward() of a layer of torch directly. A guard would cost each call of the layer
            # 0.1 µs.
            if child is module or not _of_torch(type(child)):
                found.append(GuardedCall(child, "forward"))
        found += [GuardedCall(child, name) for name in methods]
    return found


def _named(module: nn.Module, name: str) -> list[GuardedCall]:
    if not isinstance(name, str) or not name:
        raise TypeError(f"guard names methods and submodules by dotted strings, not {name!r}")
    owner, found, last = module, module, ""
    for last in name.split("."):
        owner, found = found, getattr(found, last, None)  # type: ignore[assignment]
        if found is None or not isinstance(owner, nn.Module):
            raise ValueError(
                f"guard names {name!r}, but this {type(module).__name__} has no {last!r} there; it has "
                f"{', '.join(_names(owner)) or 'nothing to call'}"
            )
    if isinstance(found, nn.Module):
        _refuse_own_call(found)
        calls = [GuardedCall(found, CALL), GuardedCall(found, "forward")] if _has_forward(found) else []
        return calls + [GuardedCall(found, method) for method in own_methods(found)]
    if last in ("forward", "__call__") and _has_forward(owner):
        if last == "__call__":
            _refuse_own_call(owner)
        return [GuardedCall(owner, CALL), GuardedCall(owner, "forward")]
    method = inspect.getattr_static(owner, last, None)
    if last.startswith("__") or (method is not None and method is getattr(nn.Module, last, None)):
        raise ValueError(
            f"guard names {name!r}, which Python or torch looks up elsewhere than on one object; name a method of "
            "yours, or 'forward' for calls of the module"
        )
    if isinstance(method, (NoneType, staticmethod, classmethod, property)) or not callable(found):
        raise ValueError(
            f"guard names {name!r}, a {type(method).__name__}, which cannot be replaced on one object. Name the method "
            "that uses it, or put it in `with sub.read():`"
        )
    _refuse_coroutine(owner, last)
    return [GuardedCall(owner, last)]


def _names(module: Any) -> list[str]:
    if not isinstance(module, nn.Module):
        return []
    return [*(["forward"] if _has_forward(module) else []), *own_methods(module), *module._modules]


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


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _of_torch(kind: type) -> bool:
    return kind is object or kind.__module__ == "torch" or kind.__module__.startswith("torch.")


def _refuse_own_call(module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if "__call__" in vars(kind) and not _of_torch(kind):
            raise ProtocolError(
                f"{kind.__name__} defines __call__() itself, which Python looks up in the class: it cannot be guarded "
                "for one object. Name the methods and submodules that it uses, as in guard=['forward'], or use "
                "guard=False and `with sub.read():`"
            )


def _refuse_coroutine(module: nn.Module, name: str) -> None:
    method = inspect.unwrap(getattr(module, name))
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        others = [each for each in _names(module) if each != name]
        raise ProtocolError(
            f"{type(module).__name__}.{name}() is a coroutine function: at each await other code of its thread runs, "
            "so no read section can cover it. Make the part that uses the weights a plain method, and list what is to "
            f"be guarded without it, as in guard={others}"
        )
