"""The guard that keeps one version for each forward of a bound module."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch._dynamo.decorators import skip

from ..errors import ClosedError
from .reading import ReadPath


def forward(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A frame of ours for Dynamo to compile: it passes over frames of torch.nn, such as Sequential's own forward."""
    return inner(*args, **kwargs)


@skip
def unalias(out: Any, aliases: Callable[[Any], bool]) -> Any:
    """Clone every tensor in the output that lies in the slab."""
    if isinstance(out, torch.Tensor):
        return out.clone() if aliases(out) else out
    if isinstance(out, TensorDictBase):
        if _any_leaf(out, aliases):
            for key, value in list(out.items(True, True)):
                if isinstance(value, torch.Tensor) and aliases(value):
                    out.set(key, value.clone())
        return out
    if out is None or isinstance(out, (bool, int, float, str)):
        return out
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if aliases(t) else t, out)


@skip
def _any_leaf(td: TensorDictBase, test: Callable[[Any], bool]) -> bool:
    # Its own dict: values() takes 1 µs a leaf, and this runs after each forward.
    store = getattr(td, "_tensordict", None) if type(td) is TensorDict else None
    for value in (td if type(store) is not dict else store).values():
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # isinstance() of TensorDicts is slow
            if test(value):
                return True
        elif isinstance(value, TensorDictBase) and _any_leaf(value, test):
            return True
    return False


class StandIn:
    """Stands in for a method of one module.

    A copy (deepcopy, pickle) of the module has its own method in this place, and knows nothing of what stood here.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.inner: Callable[..., Any] = getattr(module, name)
        self._name = name
        functools.update_wrapper(cast(Any, self), self.inner, updated=())  # callers read a policy's signature
        setattr(module, name, self)

    def remove(self) -> None:
        """Give the module its own method back."""
        if self.module.__dict__.get(self._name) is self:
            if getattr(self.inner, "__func__", None) is getattr(type(self.module), self._name):
                delattr(self.module, self._name)
            else:
                setattr(self.module, self._name, self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.inner,)


def _itself(method: Any) -> Any:
    return method


class Guard(StandIn):
    """Stands in for a bound module's `forward`: one read section around each call."""

    def __init__(self, module: nn.Module, path: ReadPath, clone_outputs: bool) -> None:
        super().__init__(module, "forward")
        self._path = path
        self._section = path.read()
        self._aliases = path._aliases
        self._clone_outputs = clone_outputs
        self._repeats = path.optimistic
        self._looked = False
        self._replaced = False  # by another binding of the module

    def remove(self) -> None:
        """Give the module its own forward back. A call that another thread has begun here goes there too."""
        self._replaced = True
        super().remove()

    # Marks this frame alone: Dynamo skips it and compiles the module's own forward below. A frame that Dynamo traced
    # would break at the section, and leave everything below eager without a word. Not torch.compiler.disable(
    # recursive=False): the same mark, but a wrapper of 0.2 µs around it.
    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, inside a section."""
        if not self._looked and torch.is_grad_enabled():
            self._look()
        try:
            if self._repeats:
                return self._path.run(self._call, args, kwargs)
            with self._section:
                if self._replaced:  # this section does not protect what the module shows now
                    return self.module.forward(*args, **kwargs)
                out = forward(self.inner, args, kwargs)
                if not self._clone_outputs:
                    return out
                if type(out) is torch.Tensor:
                    return out.clone() if self._aliases(out) else out
                return unalias(out, self._aliases)
        except ClosedError:
            if not self._replaced:
                raise
        return self.module.forward(*args, **kwargs)

    @skip
    def _call(self, args: Any, kwargs: Any) -> Any:
        if self._replaced:
            return self.module.forward(*args, **kwargs)
        out = forward(self.inner, args, kwargs)
        return unalias(out, self._aliases) if self._clone_outputs else out

    def _look(self) -> None:
        """On the first call with gradients on: warn if they may come out wrong."""
        if self._path._mine:
            return  # the caller's section may well cover the backward pass
        self._looked = True
        if not any(p.requires_grad for p in self.module.parameters()):
            return
        warnings.warn(
            "a bound module ran with gradients on: if the weights change before backward(), the gradients are wrong. "
            "Put forward and backward in one `with sub.read():`, or use torch.no_grad()",
            stacklevel=3,
        )
