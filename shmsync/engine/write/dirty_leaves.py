"""With several slots: which leaves of each slot are older than those of the current one, and so must be carried."""

from __future__ import annotations

from ...memory.manifest import Manifest, merged


class DirtyLeaves:
    """What the one writer knows of its slots' bytes; a leaf is named by its offset.

    Nothing is known of a slot that was never written whole, or whose last write did not end in a commit. Everything is
    noted before the first byte is written, so an interrupt at any moment makes the next publish carry too much, never
    too little.
    """

    def __init__(self, manifest: Manifest, slots: int) -> None:
        self._sizes = manifest.places
        self._order = sorted(self._sizes)
        self._of_slot: list[set[int] | None] = [None] * slots  # None: any leaf may be stale
        self._writing = 0

    def begin(self, slot: int, given: frozenset[int] | None) -> list[tuple[int, int]]:
        """A write of these leaves (None: of any) into a slot begins. Call written() when it is committed.

        Returns what to copy from the current slot, as (offset, bytes).
        """
        stale = self._of_slot[slot]
        self._writing = slot
        self._of_slot[slot] = None
        if given is None or len(given) == len(self._sizes):
            self._of_slot = [None] * len(self._of_slot)
            if given is not None:
                return []
        else:
            for known in self._of_slot:
                if known is not None:
                    known.update(given)
        old = self._order if stale is None else sorted(stale)
        return merged((offset, self._sizes[offset]) for offset in old if offset not in (given or ()))

    def written(self) -> None:
        """The write was committed: its slot has the newest of every leaf, and is the current one."""
        self._of_slot[self._writing] = set()
