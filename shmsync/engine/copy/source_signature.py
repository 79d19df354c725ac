"""Plans for weights that are new objects at each publish: a state_dict(), a dict, a TensorDict.

Such a source is recognised by its keys and by the place, dtype, shape and memory order of each tensor. One native call
reads them (native/bind/values.cpp). No reference to a tensor is kept after the publish.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ... import _native
from ...memory.manifest import Key, Manifest
from ..source.leaf_check import loaded_class
from ..source.sources import Filter, key_of

LEVELS = (dict, OrderedDict)  # classes that cannot answer in a way of their own
_TENSORS = (torch.Tensor, nn.Parameter)
_BYTES, _CONVERTED, _LEFT_OUT = range(3)


class Seen:
    """A source, looked at to find others like it again; `plain` when every level and tensor is of a plain class.

    Args:
        source: the weights as they were given, collected and checked.
        tensors: those of its tensors that are published, by key.
        filter, manifest: with which they were collected.
    """

    def __init__(self, source: object, tensors: Mapping[Key, Any], filter: Filter, manifest: Manifest) -> None:
        self._tensors = tensors
        self._filter = filter
        self._manifest = manifest
        self._leaves: list[tuple[Key | None, torch.Tensor]] = []
        self._tree = self._level(source, (), type(source) is _tensordict_class())
        self.plain = self._tree is not None and sum(key is not None for key, _ in self._leaves) == len(tensors)

    def _level(self, source: Any, path: Key, of_tensordict: bool) -> list[tuple[str, Any]] | None:
        store: Any = getattr(source, "_tensordict", None) if of_tensordict else source
        if type(store) not in LEVELS or (of_tensordict and type(source) is not _tensordict_class()):
            return None
        tree: list[tuple[str, Any]] = []
        for key, value in dict.items(store):
            if type(key) is not str:
                return None
            if type(value) in _TENSORS:
                found = key_of((*path, key), self._manifest, flat=not of_tensordict)
                published = self._tensors.get(found) is value
                if not published and self._filter.admits(".".join(found)):
                    return None
                tree.append((key, len(self._leaves)))
                self._leaves.append((found if published else None, value))
            else:
                below = self._level(value, (*path, key), of_tensordict)
                if below is None:
                    return None
                tree.append((key, below))
        return tree

    def outline(
        self, rows: Mapping[Key, int], converted: Mapping[Key, int]
    ) -> tuple[_native.Outline, list[int]] | None:
        """What finds such a source again, and the order in which it gives those that are converted.

        Args:
            rows: where tensors that are copied as bytes stand in the plan's table.
            converted: where those that are not stand in its list.
        """
        leaves: list[tuple[torch.Tensor, int, int, int]] = []
        order: list[int] = []
        first: dict[int, int] = {}
        for position, (key, tensor) in enumerate(self._leaves):
            if key is None:
                leaves.append((tensor, _LEFT_OUT, -1, -1))
                continue
            offset = self._manifest.by_key[key].offset
            if key in rows or key in converted:
                first[offset] = position
            elif tensor.numel() and offset not in first:
                return None  # its twin comes later
            if key in converted:
                order.append(converted[key])
                leaves.append((tensor, _CONVERTED, -1, -1))
            else:
                twin = -1 if key in rows or not tensor.numel() else first[offset]
                leaves.append((tensor, _BYTES, rows.get(key, -1), twin))
        assert self._tree is not None
        try:
            return _native.Outline(self._tree, leaves, _TENSORS, LEVELS, _tensordict_class()), order
        except ValueError:  # this torch does not show its tensors to native code
            return None


def _tensordict_class() -> type[Any] | None:
    return loaded_class("tensordict", "TensorDict")
