"""A manifest as a tree of names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..memory.inspection import ties
from ..memory.manifest import Leaf, Manifest
from .output import size

_Glyphs = tuple[str, str, str, str]  # before an entry, before the last one, and before what lies below each of them

_LINES: _Glyphs = ("├── ", "└── ", "│   ", "    ")
_ASCII: _Glyphs = ("|-- ", "`-- ", "|   ", "    ")


@dataclass
class _Branch:
    branches: dict[str, _Branch] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)

    def all_leaves(self) -> Iterator[Leaf]:
        """Its leaves, and those of the branches below it."""
        yield from self.leaves.values()
        for branch in self.branches.values():
            yield from branch.all_leaves()


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
    inner, last, rail, gap = glyphs
    entries: list[tuple[str, Leaf | _Branch]] = [*branch.leaves.items(), *branch.branches.items()]
    longest = max((len(name) for name in branch.leaves), default=0)
    for number, (name, entry) in enumerate(entries, 1):
        end = number == len(entries)
        start = before + (last if end else inner)
        if isinstance(entry, Leaf):
            yield f"{start}{name.ljust(longest)}  {_leaf(entry, first)}"
        elif depth is not None and depth <= 1:
            below = list(entry.all_leaves())
            places = {leaf.offset: leaf.nbytes for leaf in below if leaf.nbytes}  # tied leaves have one
            yield f"{start}{name}  ({len(below)} tensor{'s' * (len(below) != 1)}, {size(sum(places.values()))})"
        else:
            yield f"{start}{name}"
            rest = None if depth is None else depth - 1
            yield from _below(entry, before + (gap if end else rail), glyphs, first, rest)


def _leaf(leaf: Leaf, first: dict[int, str]) -> str:
    text = f"{leaf.dtype_name} {list(leaf.shape)}"
    if leaf.nbytes and first.get(leaf.offset, leaf.name) != leaf.name:
        return f"{text}  = {first[leaf.offset]}"
    return f"{text}  {size(leaf.nbytes)}" + (", cast" if leaf.cast else "")
