"""What torch.compile() must know of functions of ours, registered when torch._dynamo is imported.

It brings sympy, and takes as long to import as torch. A worker that compiles nothing never imports it. Without it
nothing is compiled, so the functions are plain ones until then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_DYNAMO = "torch._dynamo"
_waiting: list[Callable[[], object]] = []
_lock = threading.RLock()  # re-entrant: a call may register others


def skip(function: F) -> F:
    """Dynamo does not compile this function, but what it calls. A decorator of functions that live forever."""

    def register() -> None:
        from torch._dynamo.decorators import skip

        skip(function)

    with_dynamo(register)
    return function


class _Disabled:
    """Replaces itself in its class by the function, and that by one that Dynamo stays out of."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        def register() -> None:
            setattr(owner, name, torch.compiler.disable(self._function))

        setattr(owner, name, self._function)
        with_dynamo(register)


def disable(function: Callable[P, R]) -> Callable[P, R]:
    """As torch.compiler.disable(), for a method of a class: Dynamo compiles neither it nor what it calls."""
    return cast("Callable[P, R]", _Disabled(function))


def with_dynamo(call: Callable[[], object]) -> None:
    """Make this call as soon as Dynamo has been imported: now, or at the end of its import."""
    with _lock:
        _waiting.append(call)
        if _DYNAMO not in sys.modules and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    if _DYNAMO in sys.modules:
        import_module(_DYNAMO)  # another thread may be in the middle of it
        _imported()


def _imported() -> None:
    with _lock:
        calls = _waiting[:]
        _waiting.clear()
        # Another list: a thread that goes through this one would miss a finder.
        sys.meta_path = [each for each in sys.meta_path if each is not _finder]
    for call in calls:
        call()


class _Finder(MetaPathFinder):
    """Finds Dynamo as the other finders do, and makes the calls when it has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib asks each finder."""
        if name != _DYNAMO:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _call_afterwards(spec.loader)
                    return spec
        return None


def _call_afterwards(loader: Any) -> None:
    """The module keeps its own loader, which reads its source and its files later."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _imported()

    loader.exec_module = exec_module


_finder = _Finder()
