"""The guard that keeps one version for each forward of a bound module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch._dynamo.decorators import skip

from ..errors import ClosedError

if TYPE_CHECKING:
    from .subscriber import Subscriber


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


class Guard:
    """Stands in for an instance's `forward`: one read section around each call.

    A copy (deepcopy, pickle) of a bound module is a plain private module: its guard has no subscriber and just calls
    the copy's own forward.
    """

    def __init__(
        self, module: nn.Module, inner: Callable[..., Any], subscriber: Subscriber | None, clone_outputs: bool
    ) -> None:
        self._module = module
        self._inner = inner
        self._subscriber = subscriber
        self._clone_outputs = clone_outputs
        self._looked = subscriber is None
        self._repeats = False
        self._replaced = False  # by another binding of the module
        if subscriber is not None:
            self._section = subscriber.read()
            self._aliases = subscriber._aliases
            self._repeats = subscriber._consistency == "optimistic"

    def remove(self) -> None:
        """Give the module its own forward back. A call that another thread has begun here goes there too."""
        self._replaced = True
        if getattr(self._inner, "__func__", None) is type(self._module).forward:
            del self._module.forward
        else:
            self._module.forward = self._inner

    # Marks this frame alone: Dynamo skips it and compiles the module's own forward below. A frame that Dynamo traced
    # would break at the section, and leave everything below eager without a word. Not torch.compiler.disable(
    # recursive=False): the same mark, but a wrapper of 0.2 µs around it.
    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, inside a section."""
        subscriber = self._subscriber
        if subscriber is None:
            return self._inner(*args, **kwargs)
        if not self._looked and torch.is_grad_enabled():
            self._look()
        try:
            if self._repeats:
                return subscriber.run(self._call, args, kwargs)
            with self._section:
                if self._replaced:  # this section does not protect what the module shows now
                    return self._module.forward(*args, **kwargs)
                out = forward(self._inner, args, kwargs)
                if not self._clone_outputs:
                    return out
                if type(out) is torch.Tensor:
                    return out.clone() if self._aliases(out) else out
                return unalias(out, self._aliases)
        except ClosedError:
            if not self._replaced:
                raise
        return self._module.forward(*args, **kwargs)

    @skip
    def _call(self, args: Any, kwargs: Any) -> Any:
        if self._replaced:
            return self._module.forward(*args, **kwargs)
        out = forward(self._inner, args, kwargs)
        return unalias(out, self._aliases) if self._clone_outputs else out

    def _look(self) -> None:
        """On the first call with gradients on: warn if they may come out wrong."""
        if self._subscriber is not None and self._subscriber._mine:
            return  # the caller's section may well cover the backward pass
        self._looked = True
        if not any(p.requires_grad for p in self._module.parameters()):
            return
        warnings.warn(
            "a bound module ran with gradients on: if the weights change before backward(), the gradients are wrong. "
            "Put forward and backward in one `with sub.read():`, or use torch.no_grad()",
            stacklevel=3,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return Guard(copy.deepcopy(self._module, memo), copy.deepcopy(self._inner, memo), None, self._clone_outputs)

    def __reduce__(self) -> Any:
        return Guard, (self._module, self._inner, None, self._clone_outputs)
