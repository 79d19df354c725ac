"""What leaves a section: nothing in it may change with the next version."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributions import Distribution, Transform

from ...errors import ProtocolError
from ..source.leaf_check import is_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Test = Callable[[torch.Tensor], bool]

_INVERSE = type(Transform().inv)


def private(out: Any, aliases: Test, given: tuple[Any, ...] = ()) -> Any:
    """`out` with a clone in place of each tensor in it that lies in the arena; itself if there is none.

    It looks into tuples, lists, dicts, dataclasses, TensorDicts and distributions. Each that holds such a tensor is
    copied, since it may be the module's own. A TensorDict that was among the arguments (`given`) is written into,
    unless it is locked, as the weights of a section are.

    Raises ProtocolError for a generator or a coroutine, which would run outside of the section.
    """
    made: Any
    if isinstance(out, torch.Tensor):
        return out.clone() if aliases(out) else out
    if is_tensordict(out):
        return _levels(out, aliases, given)
    if isinstance(out, (tuple, list)):
        values = [private(value, aliases, given) for value in out]
        if not any(made is not value for made, value in zip(values, out, strict=True)):
            return out
        return out._make(values) if hasattr(out, "_make") else type(out)(values)
    if isinstance(out, _INVERSE):
        forward = out.inv
        made = private(forward, aliases, given)
        return out if made is forward else made.inv
    if isinstance(out, (Generator, Coroutine, AsyncGenerator)):
        if not isinstance(out, AsyncGenerator):
            out.close()
        raise ProtocolError(
            f"what was called returned a {type(out).__name__}, which runs later, where no read section covers it. "
            "Make the part that uses the weights a plain method, and loop or await around it; or use "
            "bind(clone_outputs=False), and run it inside `with sub.read():`"
        )
    parts = _parts(out)
    changed = {key: made for key, value in parts.items() if (made := private(value, aliases, given)) is not value}
    if not changed:
        return out
    made = copy.copy(out)
    for key, value in changed.items():
        if isinstance(out, dict):
            made[key] = value
        else:
            object.__setattr__(made, key, value)  # a dataclass may be frozen
    return made


def _parts(out: Any) -> dict[Any, Any]:
    """The values inside a dict, a dataclass or a distribution, by key or by attribute; {} for anything else."""
    if isinstance(out, dict):  # and transformers' ModelOutput, whose attributes are its items
        return dict(out)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return {each.name: getattr(out, each.name) for each in dataclasses.fields(out) if hasattr(out, each.name)}
    if isinstance(out, (Distribution, Transform)):
        return {name: value for name, value in vars(out).items() if name != "_inv"}  # which copy() leaves out too
    return {}


def _levels(out: TensorDictBase, aliases: Test, given: tuple[Any, ...]) -> TensorDictBase:
    if not _holds(out, aliases):
        return out
    lying = [(key, leaf) for key, leaf in out.items(True, True) if isinstance(leaf, torch.Tensor) and aliases(leaf)]
    made = out if any(out is each for each in given) and not out.is_locked else out.copy()  # locked: the weights
    for key, leaf in lying:
        made.set(key, leaf.clone())
    return made


def _holds(out: Any, aliases: Test) -> bool:
    """Lies a tensor of this collection in the arena? Level by level: items() of all levels takes four times as long."""
    for value in out.values():
        if isinstance(value, torch.Tensor):
            if aliases(value):
                return True
        elif hasattr(value, "batch_size") and _holds(value, aliases):  # a TensorDict, or a tensorclass
            return True
    return False


FRAMES = (private, _parts, _levels, _holds)  # which Dynamo must not compile: bind/compiled.py
