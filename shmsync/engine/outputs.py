"""What a guarded call returns: nothing in it may change, or be computed, after the section has ended."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch._dynamo.decorators import skip

from ..errors import ProtocolError

Test = Callable[[Any], bool]


@skip
def unalias(out: Any, aliases: Test) -> Any:
    """Clone every tensor in the output that lies in the slab."""
    if isinstance(out, torch.Tensor):
        return out.clone() if aliases(out) else out
    if type(out) is tuple:
        return tuple(map(functools.partial(unalias, aliases=aliases), out))
    if type(out) is list:
        out[:] = map(functools.partial(unalias, aliases=aliases), out)
        return out
    if out is None or isinstance(out, (bool, int, float, str)):
        return out
    if is_tensorclass(out):
        unalias(out._tensordict, aliases)
        return out
    if isinstance(out, TensorDictBase):
        if _any_leaf(out, aliases):
            for key, value in list(out.items(True, True)):
                if isinstance(value, torch.Tensor) and aliases(value):
                    out.set(key, value.clone())
        return out
    if isinstance(out, torch.distributions.Distribution):
        for name, value in list(vars(out).items()):  # the parameters it was made of
            if isinstance(value, (torch.Tensor, torch.distributions.Distribution)):
                vars(out)[name] = unalias(value, aliases)
        return out
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if aliases(t) else t, out)


@skip
def _any_leaf(td: TensorDictBase, test: Test) -> bool:
    # The dict inside it: values() takes 1 µs a leaf, and this runs after each forward.
    store = getattr(td, "_tensordict", None) if type(td) is TensorDict else None
    for value in (td if type(store) is not dict else store).values():
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # isinstance() of TensorDicts is slow
            if test(value):
                return True
        elif isinstance(value, TensorDictBase) and _any_leaf(value, test):
            return True
    return False


@skip
def refuse_awaitable(out: Any) -> None:
    """Raise ProtocolError for what runs later, between other things of its thread: no section can cover it."""
    if isinstance(out, Coroutine):
        out.close()
    if isinstance(out, (Coroutine, AsyncGenerator)):
        raise ProtocolError(
            "a method of a bound module returned a coroutine: at each await other code of this thread runs, so no read "
            "section can cover it. Make the part that uses the weights a plain method, and await around it"
        )


class Held(Generator[Any, Any, Any]):
    """A generator that holds a section from its first step until it ends, is closed or is collected.

    Args:
        inner: the generator of the module's method.
        section: is entered at the first step.
        finish: what each yielded value passes through.
    """

    def __init__(
        self, inner: Generator[Any, Any, Any], section: AbstractContextManager[Any], finish: Callable[[Any], Any]
    ) -> None:
        self._inner = inner
        self._section = section
        self._finish = finish
        self._holds = False
        self._ended = False

    def send(self, value: Any) -> Any:
        """Go on until the next value."""
        return self._step(lambda: self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise inside the generator."""
        return self._step(lambda: self._inner.throw(*error))

    def close(self) -> None:
        """End it, and leave the section."""
        try:
            self._inner.close()
        finally:
            self._leave()

    def hold(self) -> None:
        """Enter the section now."""
        if not self._holds:
            self._section.__enter__()
            self._holds = True

    def _step(self, step: Callable[[], Any]) -> Any:
        if not self._ended:
            self.hold()
        try:
            return self._finish(step())
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._ended = True
        if self._holds:
            self._holds = False
            self._section.__exit__(None, None, None)

    def __del__(self) -> None:
        if self._holds:
            self.close()
