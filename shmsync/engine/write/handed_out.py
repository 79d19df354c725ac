"""Has update() handed out anything that can be written? If not, a body that fails has changed nothing.

A TensorDict hands its leaves out in many ways. So it has another class until the first use of any attribute, which
makes it the usual TensorDict and counts as a hand-out. Looking up a missing key does not count. What a body kept from
an earlier update(), a leaf or a level of the TensorDict, is found by its reference count.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from ...memory.dotted import DottedTensorDict
from ...memory.manifest import Key
from ..source.overlaps import shown_by_others

_ATTRIBUTE = "_shmsync_hand_out"


class HandOut:
    """What update() of one arena hands out.

    Args:
        weights: what update() gives its body; no leaf was handed out yet.
        views: its leaves.

    Attributes:
        names: the leaves' dotted keys.
        done: was anything handed out?
    """

    def __init__(self, weights: TensorDict, views: Mapping[Key, torch.Tensor]) -> None:
        self._weights = weights
        self._leaves = list({id(view): view for view in views.values()}.values())
        self._below = [each for each in weights.values(include_nested=True) if isinstance(each, TensorDictBase)]
        self.names = [".".join(key) for key in views]
        self._known = {key[:size] for key in views for size in range(1, len(key) + 1)}
        self._dotted = {".".join(path) for path in self._known}
        self._counts = self._references()
        self.done = False

    def begin(self) -> None:
        """Watch from now on; outside of update() nothing is watched."""
        self.done = False
        vars(self._weights)[_ATTRIBUTE] = self
        self._weights.__class__ = Untouched

    def end(self) -> None:
        """Watch no more."""
        self._weights.__class__ = DottedTensorDict
        vars(self._weights).pop(_ATTRIBUTE, None)  # a cycle would keep the slab until the next garbage collection

    def may_have_written(self) -> bool:
        """Was anything handed out, or kept from an earlier update()?"""
        return self.done or self._references() != self._counts or shown_by_others(self._leaves, self._leaves)

    def lacks(self, key: Any) -> bool:
        """Is this the key of no leaf and of no level? False for what may be an index."""
        path = (key,) if type(key) is str else key
        named = type(path) is tuple and path != () and all(type(part) is str for part in path)
        return named and path not in self._known and ".".join(path) not in self._dotted

    def hand_out(self) -> None:
        """Something may have been handed out."""
        self.done = True
        self.end()

    def _references(self) -> list[int]:
        return [sys.getrefcount(each) for each in (*self._leaves, *self._below)]


class Untouched(DottedTensorDict):
    """The weights, of which nothing was used yet."""

    def __getattribute__(self, name: str) -> Any:
        plain = object.__getattribute__
        watch = plain(self, "__dict__").get(_ATTRIBUTE)
        if watch is not None:  # else another thread's use of it came first
            watch.hand_out()
        return plain(self, name)

    def __getitem__(self, key: Any) -> Any:
        """As a TensorDict's; a key that is not there hands nothing out."""
        watch = object.__getattribute__(self, "__dict__").get(_ATTRIBUTE)
        if watch is None:  # another thread's use came first, and left a plain TensorDict
            return self[key]
        if watch.lacks(key):  # this frame refers to no level: the traceback keeps it
            raise KeyError(
                f"the weights have no key {key!r}; their {len(watch.names)} leaves begin with {watch.names[:3]}, and "
                "weights.keys(True, True) lists all"
            )
        watch.hand_out()
        return self[key]


Untouched.__name__ = TensorDict.__name__  # what the KeyError of a missing key calls it

with suppress(ImportError):  # pytrees know classes, and not those derived from them
    from tensordict._pytree import _register_td_node

    _register_td_node(Untouched)
