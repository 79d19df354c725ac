"""A manifest as a tree of names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..memory.inspection import ties
from ..memory.manifest import Leaf, Manifest
from .output import size


class _Glyphs(NamedTuple):
    inner: str
    last: str
    rail: str
    gap: str


_LINES = _Glyphs("├── ", "└── ", "│   ", "    ")
_ASCII = _Glyphs("|-- ", "`-- ", "|   ", "    ")


@dataclass
class _Branch:
    branches: dict[str, _Branch] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)

    def totals(self) -> tuple[int, int]:
        """Names of tensors below it, and their bytes; tied ones count once."""
        count, places = self._collect()
        return count, sum(places.values())

    def _collect(self) -> tuple[int, dict[int, int]]:
        count = len(self.leaves)
        places = {leaf.offset: leaf.nbytes for leaf in self.leaves.values() if leaf.nbytes}
        for branch in self.branches.values():
            inner, more = branch._collect()
            count += inner
            places |= more
        return count, places


def lines_of(manifest: Manifest, *, ascii_only: bool = False, depth: int | None = None) -> Iterator[str]:
    """The lines of the tree; what lies below `depth` levels as a total."""
    root = _Branch()
    for leaf in manifest.leaves:
        branch = root
        for part in leaf.key[:-1]:
            branch = branch.branches.setdefault(part, _Branch())
        branch.leaves[leaf.key[-1]] = leaf
    first = {offset: names[0] for offset, names in ties(manifest).items()}
    yield from _below(root, "", _ASCII if ascii_only else _LINES, first, depth)


def _below(branch: _Branch, before: str, glyphs: _Glyphs, first: dict[int, str], depth: int | None) -> Iterator[str]:
    entries: list[tuple[str, Leaf | _Branch]] = [*branch.leaves.items(), *branch.branches.items()]
    longest = max((len(name) for name in branch.leaves), default=0)
    for number, (name, entry) in enumerate(entries, 1):
        end = number == len(entries)
        start = before + (glyphs.last if end else glyphs.inner)
        if isinstance(entry, Leaf):
            yield f"{start}{name.ljust(longest)}  {_leaf(entry, first)}"
        elif depth is not None and depth <= 1:
            count, total = entry.totals()
            yield f"{start}{name}  ({count} tensor{'s' * (count != 1)}, {size(total)})"
        else:
            yield f"{start}{name}"
            rest = None if depth is None else depth - 1
            yield from _below(entry, before + (glyphs.gap if end else glyphs.rail), glyphs, first, rest)


def _leaf(leaf: Leaf, first: dict[int, str]) -> str:
    text = f"{leaf.dtype_name} {list(leaf.shape)}"
    if leaf.nbytes and first.get(leaf.offset, leaf.name) != leaf.name:
        return f"{text}  = {first[leaf.offset]}"
    return f"{text}  {size(leaf.nbytes)}" + (", cast" if leaf.cast else "")
