"""A dict whose keys are compared by identity, and held weakly.

Modules may define their own equality, and a TensorDict's is by element, so a WeakKeyDictionary does not do. torch's own
WeakIdKeyDictionary asks each key for an attribute at every look, which a module answers in microseconds.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """Values by living object; an entry goes with its object."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}

    def get(self, key: K) -> V | None:
        """The value of this very object, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: K, value: V) -> None:
        number, entries = id(key), self._entries

        def gone(reference: weakref.ref[K]) -> None:
            entry = entries.get(number)
            if entry is not None and entry[0] is reference:  # else another object has its place in memory by now
                del entries[number]

        entries[number] = (weakref.ref(key, gone), value)

    def pop(self, key: K) -> None:
        """Drop the entry of this object, if there is one."""
        self._entries.pop(id(key), None)

    def clear(self) -> None:
        """Drop every entry."""
        self._entries.clear()
