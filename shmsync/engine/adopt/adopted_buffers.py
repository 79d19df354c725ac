"""The buffers of an adopted module: they stay private, and are copied into the slab at the end of each update().

Forward passes write buffers (BatchNorm) and replace them, outside any update().
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ... import _native
from ...memory.arena import Arena
from ...memory.devices import assign
from ...memory.manifest import Key, Leaf
from ...memory.torch_modes import plainly
from ..source.manifest_check import direct
from ..source.sources import WatchedDict
from .adoptable import Parts


class _Buffer(NamedTuple):
    """A buffer of the module: found by its name in each update(), and copied to its place."""

    store: dict[str, Any]
    name: str
    leaf: Leaf
    view: torch.Tensor  # its place

    @property
    def tensor(self) -> Any:
        return self.store.get(self.name)

    @property
    def fits(self) -> bool:
        tensor, view = self.tensor, self.view
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == view.shape
            and tensor.dtype == view.dtype
            and tensor.device == view.device
        )


class AdoptedBuffers:
    """The buffers that one adoption copies, each found again by its name.

    Args:
        arena: whose only slot has a place for each.
        views: these places.
    """

    def __init__(self, arena: Arena, views: Mapping[Key, torch.Tensor]) -> None:
        self._arena, self._views = arena, views
        self._entries: list[_Buffer] = []
        self._stores: list[tuple[dict[str, Any], tuple[str, ...], list[tuple[str, Any]]]] = []
        self._table: _native.Sources | None = None  # as far as they are as they were

    def remember(self, parts: Parts) -> list[WatchedDict] | None:
        """Know the buffers of a module that was just looked at without looking at each of its tensors again.

        Returns the module's dicts that hold no buffer, to be watched. None: the next look is at everything.
        """
        leaves = self._arena.manifest.by_key
        watched, found, stores = [], [], []
        buffers = {key: t for key, t in parts.collected.tensors.items() if key not in parts.placed}
        keys: dict[int, list[Key]] = {}
        for key, tensor in buffers.items():
            keys.setdefault(id(tensor), []).append(key)
        missing = dict(keys)
        for store, entries, whole in parts.collected.watched_dicts or ():
            here = [(name, value) for name, value in entries if whole and id(value) in keys]
            if not here:
                watched.append((store, entries, whole))
                continue
            for name, value in here:
                found += [_Buffer(store, name, leaves[key], self._views[key]) for key in missing.pop(id(value), ())]
            # One that has several names may not be replaced under one of them without another look.
            fixed = [(name, value) for name, value in entries if len(keys.get(id(value), ())) != 1]
            stores.append((store, tuple(store), fixed))
        places = {(leaves[key].offset, id(t)) for key, t in buffers.items() if leaves[key].nbytes}
        shared = len(places) != len({offset for offset, _ in places})  # two buffers for one place
        if parts.collected.watched_dicts is not None and not (missing or shared or parts.equal):
            self._entries, self._stores = found, stores
            self._table = self._made_table()
            return watched
        self._entries = [_Buffer({"": t}, "", leaves[key], self._views[key]) for key, t in buffers.items()]
        self._stores, self._table = [], None
        return None

    def unchanged(self) -> bool:
        """Are they where they were, but for buffers that were replaced by ones like them?"""
        if self._table is not None and self._table.revalidate():
            return True
        for store, names, fixed in self._stores:
            if tuple(store) != names or any(store[name] is not value for name, value in fixed):
                return False
        if not all(buffer.fits for buffer in self._entries):
            return False
        self._table = self._made_table()
        return True

    def _made_table(self) -> _native.Sources | None:
        """Copies all of them in one native call; None if some have to be gathered first."""
        if self._arena.on_device is not None or not all(direct(each.tensor, each.leaf) for each in self._entries):
            return None
        rows = [(each.tensor, each.leaf.offset, each.leaf.nbytes) for each in self._entries]
        return _native.Sources([(store, list(store.items()), True) for store, _, _ in self._stores], rows)

    def copy(self) -> int:
        """Bring the slab's copies up to date, just after the adoption has looked at its module; the bytes copied."""
        if self._table is not None:
            self._table.copy_to(self._arena.slot_address(0))
            return int(self._table.bytes)
        with plainly():
            for each in self._entries:
                assign(each.view, each.tensor)
        return sum(each.view.nbytes for each in self._entries)
