"""What torch.compile() must know of functions of ours, registered when torch._dynamo is imported.

It brings sympy, and takes as long to import as torch. A worker that compiles nothing never imports it. Without it
nothing is compiled, so the functions are plain ones until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from .system.when_imported import when_imported

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def skip(function: F) -> F:
    """Dynamo does not compile this function, but what it calls. A decorator of functions that live forever."""

    def register() -> None:
        from torch._dynamo.decorators import skip

        skip(function)

    when_imported("torch._dynamo", register)
    return function


class _Disabled:
    """Replaces itself in its class by the function, and that by one that Dynamo stays out of."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        def register() -> None:
            setattr(owner, name, torch.compiler.disable(self._function))

        setattr(owner, name, self._function)
        when_imported("torch._dynamo", register)


def disable(function: Callable[P, R]) -> Callable[P, R]:
    """As torch.compiler.disable(), for a method of a class: Dynamo compiles neither it nor what it calls."""
    return cast("Callable[P, R]", _Disabled(function))
