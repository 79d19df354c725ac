"""What a guarded call returns: nothing in it may change, or be computed, after the section has ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import torch

from ...errors import ProtocolError
from ...memory.dynamo import skip
from ..source.leaf_check import is_tensordict, loaded_class
from .reachable import Reach, Test


@skip
def unalias(out: Any, aliases: Test, given: tuple[Any, ...] = ()) -> Any:
    """The output with a copy in place of everything that lies in the arena; itself if there is none.

    What holds such a thing is copied too, since it may be the module's own list or object; a TensorDict that was among
    the arguments is written into. What was one object twice stays one. Raises ProtocolError for what holds memory of
    the arena and cannot be copied.
    """
    if type(out) is torch.Tensor and not aliases(out) and out.layout is torch.strided and not out.is_nested:
        return out

    def copied(td: Any) -> Any:
        return _unalias_tensordict(td, aliases, given)

    def holds(td: Any) -> bool:
        return _any_leaf(td if is_tensordict(td) else td._tensordict, aliases)

    reach = Reach(aliases, copied, holds)
    if not reach.finds(out):
        return out
    made = reach.copy(out)
    check = Reach(aliases, copied, holds)
    if check.finds(made):
        raise ProtocolError(
            f"the {type(out).__name__} that was returned holds views of the weights even in a copy of it; return "
            "tensors, or clone() what it keeps"
        )
    return made


@skip
def unalias_error(error: BaseException, aliases: Test) -> None:
    """Let an error that leaves a section hold copies of what lies in the arena. It stays the same object."""
    args = unalias(error.args, aliases)
    if args is not error.args:
        error.args = args
    if isinstance(error, StopIteration):
        error.value = unalias(error.value, aliases)
    attributes = vars(error)
    made = unalias(attributes, aliases)
    if made is not attributes:
        attributes.update(made)


@skip
def _unalias_tensordict(out: Any, aliases: Test, given: tuple[Any, ...]) -> Any:
    td = out if is_tensordict(out) else out._tensordict
    if not _any_leaf(td, aliases):
        return out
    if not any(out is each for each in given):
        out = out.copy()
        td = out if is_tensordict(out) else out._tensordict
    for key, value in list(td.items(True, True)):
        if isinstance(value, torch.Tensor) and aliases(value):
            td.set(key, value.clone())
    return out


@skip
def _any_leaf(td: Any, test: Test) -> bool:
    # The dict inside it: values() takes 1 µs a leaf, and this runs after each forward.
    store = getattr(td, "_tensordict", None) if type(td) is loaded_class("tensordict", "TensorDict") else None
    for value in (td if type(store) is not dict else store).values():
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # isinstance() of TensorDicts is slow
            if test(value):
                return True
        elif is_tensordict(value) and _any_leaf(value, test):
            return True
    return False


@skip
def refuse_awaitable(out: Any) -> None:
    """Raise ProtocolError for what runs later, between other things of its thread: no section can cover it."""
    cls = type(out)  # isinstance() would ask the object for its class
    if issubclass(cls, Coroutine):
        out.close()
    if issubclass(cls, (Coroutine, AsyncGenerator)):
        raise ProtocolError(
            "a method of a bound module returned a coroutine: at each await other code of this thread runs, so no read "
            "section can cover it. Make the part that uses the weights a plain method, and await around it"
        )
