"""TensorDicts that also know their leaves by dotted key, as a state_dict() spells it.

`weights["2.bias"]` is `weights["2", "bias"]`. A key that contains dots itself, as one of a flat TensorDict may, comes
first. What is pickled of such a TensorDict is a plain one.

Functions import this file when they make a TensorDict: a worker that only calls its module never imports tensordict.
"""

from __future__ import annotations

import copyreg
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, SupportsIndex

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn


class DottedTensorDict(TensorDict):
    """A TensorDict of weights, with dotted keys beside its own.

    Attributes:
        live: of an arena's, the call that gives it in another process of the machine, with its handle.
    """

    live: Any = None

    @property
    def handle(self) -> Any:
        """Of an arena's: what a Subscriber attaches with; else None."""
        return None if self.live is None else self.live[1][0]

    def is_shared(self) -> bool:
        """Does it lie in memory that other processes map?"""
        return self.live is not None or super().is_shared()

    def __getitem__(self, index: Any) -> Any:
        """As a TensorDict's; also of a dotted key."""
        return super().__getitem__(self._own(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """As a TensorDict's; also of a dotted key. `weights[key] += 1` is allowed where the weights are locked."""
        key = self._own(index)
        if isinstance(value, torch.Tensor) and type(key) in (str, tuple) and super().get(key, None) is value:
            return  # += has written in place
        super().__setitem__(key, value)

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """As a TensorDict's; also of a dotted key."""
        return super().get(self._own(key), *args, **kwargs)

    def set_(self, key: Any, item: Any, **kwargs: Any) -> Any:
        """As a TensorDict's; also of a dotted key."""
        return super().set_(self._own(key), item, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return copyreg._reconstructor, (TensorDict, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def _own(self, index: Any) -> Any:
        """The key that an index stands for; other indices as they are."""
        path = (index,) if type(index) is str else index
        if type(path) is not tuple or not all(type(part) is str for part in path) or not any("." in p for p in path):
            return index
        return spelled(self, ".".join(path)) or index


def spelled(weights: Any, name: str) -> tuple[str, ...] | None:
    """The key path in a tree of TensorDicts whose dotted form this is, or None."""
    keys = weights.keys()
    if name in keys:
        return (name,)
    end = name.find(".")
    while end >= 0:
        head = name[:end]
        if head in keys and isinstance(below := weights.get(head), TensorDictBase):
            rest = spelled(below, name[end + 1 :])
            if rest is not None:
                return (head, *rest)
        end = name.find(".", end + 1)
    return None


_PLAIN = (torch.Tensor, nn.Parameter, TensorDict)
_NO_BATCH = torch.Size([])


def tensordict_of(values: dict[str, Any], kind: type[TensorDict] = TensorDict) -> TensorDict:
    """kind(values, batch_size=[]), whose constructor would take ten times as long to look at each value."""
    if not all(type(value) in _PLAIN for value in values.values()):
        return kind(values, batch_size=[])
    made: TensorDict = kind._new_unsafe(values, batch_size=_NO_BATCH)
    return made


def _reduced(weights: DottedTensorDict) -> Any:
    """What queues and pipes make of it: in the other process an arena's is live, with the values of that time."""
    return weights.__reduce_ex__(2) if weights.live is None else weights.live


ForkingPickler.register(DottedTensorDict, _reduced)


def dotted(weights: TensorDict) -> TensorDict:
    """The same leaves in a TensorDict that takes dotted keys."""
    return tensordict_of(dict(weights.items()), DottedTensorDict)


DottedTensorDict.__name__ = TensorDict.__name__  # what repr() and errors call it

with suppress(ImportError):  # pytrees know classes, and not those derived from them
    from tensordict._pytree import _register_td_node

    _register_td_node(DottedTensorDict)
