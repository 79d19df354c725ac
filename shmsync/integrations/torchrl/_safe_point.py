"""Where a worker's policy may change: between two forwards, and never while one runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch._dynamo.decorators import skip

from ...binding import forward, unalias
from ...subscriber import Subscriber
from ._clock import VersionClock


class SafePoint:
    """Stands in for a policy's `forward`: each call is one read section of the arena that the policy is bound to now.

    The lock also keeps the thread out that moves the policy while it is idle. Unlike the Guard of Subscriber.bind()
    it stays when the policy is bound to another arena, so that a forward on its way in finds the new one.

    A copy (deepcopy, pickle) of the policy is a plain private module.
    """

    def __init__(self, module: nn.Module, lock: AbstractContextManager[Any], clock: VersionClock) -> None:
        self._module = module
        self._inner: Callable[..., Any] = module.forward
        self._lock = lock
        self._clock = clock
        self._subscriber: Subscriber | None = None
        functools.update_wrapper(self, self._inner)  # TorchRL reads a policy's signature
        module.forward = self

    def use(self, subscriber: Subscriber) -> None:
        """From now on sections are this subscriber's. Hold the lock."""
        self._section = subscriber.read()
        self._aliases = subscriber._aliases
        self._subscriber = subscriber

    def remove(self) -> None:
        """Give the module its own forward back. Hold the lock."""
        self._subscriber = None
        if self._module.__dict__.get("forward") is self:
            if getattr(self._inner, "__func__", None) is type(self._module).forward:
                del self._module.forward
            else:
                self._module.forward = self._inner

    @skip  # as Guard's: Dynamo compiles the module's own forward below, not this frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, inside a section."""
        if self._subscriber is None:
            return self._inner(*args, **kwargs)
        with self._lock:
            if self._subscriber is None:  # removed meanwhile
                return self._inner(*args, **kwargs)
            with self._section:
                self._clock.forward_begins(args)
                return unalias(forward(self._inner, args, kwargs), self._aliases)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _Plain.of(self).__deepcopy__(memo)

    def __reduce__(self) -> Any:
        return _Plain.of(self).__reduce__()


class _Plain:
    """The forward of a copied policy: just the copy's own."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        self._module, self._inner = module, inner

    @classmethod
    def of(cls, safe_point: SafePoint) -> _Plain:
        return cls(safe_point._module, safe_point._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Plain:
        return _Plain(copy.deepcopy(self._module, memo), copy.deepcopy(self._inner, memo))

    def __reduce__(self) -> Any:
        return _Plain, (self._module, self._inner)
