"""What a guarded call returns: nothing in it may change, or be computed, after the section has ended."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import nn
from torch._dynamo.decorators import skip

from ..errors import ProtocolError

Test = Callable[[Any], bool]


@skip
def unalias(out: Any, aliases: Test, given: tuple[Any, ...] = ()) -> Any:
    """The output with a clone in place of every tensor that lies in the slab; itself if there is none.

    What holds such a tensor is made anew, since it may be the module's own list or dict; a TensorDict that was among
    the arguments is written into.
    """
    if isinstance(out, torch.Tensor):
        return out.clone() if aliases(out) else out
    if out is None or isinstance(out, (bool, int, float, str, nn.Module)):
        return out
    kind = type(out)
    if kind is tuple or kind is list:
        made = list(map(functools.partial(unalias, aliases=aliases), out))
        return out if all(map(operator.is_, made, out)) else kind(made)
    if kind is dict:
        made = list(map(functools.partial(unalias, aliases=aliases), out.values()))
        return out if all(map(operator.is_, made, out.values())) else dict(zip(out, made, strict=True))
    if is_tensorclass(out) or isinstance(out, TensorDictBase):
        return _unalias_tensordict(out, aliases, given)
    if isinstance(out, torch.distributions.Distribution):
        return _with(out, vars(out), aliases)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return _with(out, {each.name: getattr(out, each.name, None) for each in dataclasses.fields(out)}, aliases)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and out.size:
        return out.copy() if aliases(_seen(out)) else out
    if not any(isinstance(leaf, torch.Tensor) and aliases(leaf) for leaf in torch.utils._pytree.tree_leaves(out)):
        return out
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if aliases(t) else t, out)


@skip
def _with(out: Any, fields: dict[str, Any], aliases: Test) -> Any:
    """A copy of the object in which these fields hold clones; itself if there is nothing to clone."""
    made = {name: unalias(value, aliases) for name, value in fields.items()}
    changed = {name: value for name, value in made.items() if value is not fields[name]}
    if not changed:
        return out
    twin = copy.copy(out)
    for name, value in changed.items():
        object.__setattr__(twin, name, value)
    return twin


@skip
def _seen(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the array is not writable", which is not tried
        return torch.as_tensor(array)


@skip
def _unalias_tensordict(out: Any, aliases: Test, given: tuple[Any, ...]) -> Any:
    td = out if isinstance(out, TensorDictBase) else out._tensordict
    if not _any_leaf(td, aliases):
        return out
    if not any(out is each for each in given):
        out = out.copy()
        td = out if isinstance(out, TensorDictBase) else out._tensordict
    for key, value in list(td.items(True, True)):
        if isinstance(value, torch.Tensor) and aliases(value):
            td.set(key, value.clone())
    return out


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


class HeldSections(Protocol):
    """Sections that are held beyond one call."""

    def enter(self) -> None:
        """Enter all, or none."""

    def leave(self) -> None:
        """Leave all, in whatever thread this is."""


class Held(Generator[Any, Any, Any]):
    """A generator that holds a section from its first step until it ends, is closed or is collected.

    Args:
        inner: the generator of the module's method.
        sections: are entered at the first step.
        finish: what each yielded value passes through.
    """

    def __init__(self, inner: Generator[Any, Any, Any], sections: HeldSections, finish: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._sections = sections
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
            self._sections.enter()
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
            self._sections.leave()

    def __del__(self) -> None:
        if self._holds:
            self.close()
