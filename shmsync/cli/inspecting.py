"""`shmsync inspect NAME`: weights, slots and readers of one arena."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from ..errors import ShmSyncError
from ..memory.inspection import ArenaSeen, Condition, SlotSeen, command_of, manifest_of, ties
from ..memory.manifest import Leaf, Manifest, tree
from .listing import as_dict
from .measures import look_twice, not_found
from .output import Commands, Page, command, duration, per_second, seconds, size

_EXAMPLES = """
shmsync inspect policy
shmsync inspect policy --depth 1             totals of what is deeper
shmsync inspect policy --digest              a hash of each tensor, as pub.digest() has it
shmsync inspect policy --json | jq '.readers[] | select(.lag > 0)'
"""
# Before an entry of the tree, before the last one, and before what lies below each of them.
_LINES = ("├── ", "└── ", "│   ", "    ")
_ASCII = ("|-- ", "`-- ", "|   ", "    ")
_HEAD = ("WORKER", "PID", "IS", "ACKED", "LAG", "PINNED", "FOR", "READS", "TORN", "RETRIES", "COMMAND")


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "inspect", "weights, slots and readers of one arena", _EXAMPLES)
    made.add_argument("name", metavar="NAME", help="the arena's name, as `shmsync list` shows it")
    made.add_argument("--json", action="store_true", help="for programs; times in seconds, sizes in bytes")
    made.add_argument("--depth", type=int, default=math.inf, metavar="N", help="show so many levels of the weights")
    made.add_argument("--digest", action="store_true", help="attach as a reader, and show a hash of each tensor")
    made.add_argument(
        "--interval", type=seconds(), default=0.5, metavar="S", help="count versions for so many seconds (0.5)"
    )
    made.set_defaults(run=_run)


def find(name: str, interval: float) -> tuple[ArenaSeen, float | None]:
    """One arena, and its versions per second. Raises ArenaNotFound, which names those that there are."""
    found = look_twice(interval, [name])
    if not found:
        raise not_found(name)
    return found[0]


def _run(arguments: argparse.Namespace) -> int:
    seen, rate = find(arguments.name, arguments.interval)
    manifest: Manifest | None = None
    problem = ""
    try:
        manifest = manifest_of(seen.name) if seen.readable else None
    except ShmSyncError as error:
        problem = str(error)
    digested = _digested(seen.name) if arguments.digest else None
    page = Page()
    if arguments.json:
        shown = as_dict(seen, rate) | {"leaves": _leaves(manifest)}
        if digested is not None:
            shown["digest"] = {"version": digested[0], "leaves": digested[1]}
        page.line(json.dumps(shown))
        return 0
    _head(page, seen, rate, arguments.interval)
    if not seen.readable:
        return 0
    page.line()
    if manifest is None:
        page.wrapped(f"weights: {problem}", "")
    else:
        tied = sum(len(names) for names in ties(manifest).values())
        more = f", {tied} names of tied ones" if tied else ""
        page.wrapped(f"weights: {len(manifest.leaves)} tensors, {size(manifest.used_bytes)}{more}", "")
        weights = tree({leaf.key: leaf for leaf in manifest.leaves})
        first = {offset: names[0] for offset, names in ties(manifest).items()}
        for line in _tree(weights, "", _LINES if page.shows("".join(_LINES)) else _ASCII, first, arguments.depth):
            page.line(page.cut(line))
    if digested is not None:
        page.line()
        page.line(f"digests of version {digested[0]}")
        for name, digest in digested[1].items():
            page.line(f"  {digest}  {name}")
    page.line()
    page.line("slots")
    for number, slot in enumerate(seen.slots):
        page.wrapped(_slot(slot), "     ", f"  {number}  ")
    page.line()
    page.line(f"readers: {len(seen.readers)} of {seen.max_readers} rows")
    if seen.readers:
        page.table(_HEAD, _readers(seen), right=(0, 1, 3, 4, 5, 6, 7, 8, 9), indent="  ")
    return 0


def _digested(name: str) -> tuple[int, dict[str, str]]:
    from ..engine.subscriber import Subscriber  # which imports torch

    with Subscriber(name, consistency="optimistic") as sub:
        return sub.digest()


def _tree(
    level: dict[str, Any], before: str, glyphs: tuple[str, ...], first: dict[int, str], depth: float
) -> Iterator[str]:
    """The lines of a tree of leaves; what lies below `depth` levels as a total. `first`: of tied ones, by offset."""
    inner, last, rail, gap = glyphs
    entries = sorted(level.items(), key=lambda entry: type(entry[1]) is dict)  # leaves come first
    longest = max((len(name) for name, entry in entries if isinstance(entry, Leaf)), default=0)
    for number, (name, entry) in enumerate(entries, 1):
        end = number == len(entries)
        start = before + (last if end else inner)
        if isinstance(entry, Leaf):
            yield f"{start}{name.ljust(longest)}  {_leaf(entry, first)}"
        elif depth <= 1:
            below = list(_below(entry))
            places = {leaf.offset: leaf.nbytes for leaf in below if leaf.nbytes}  # tied leaves have one
            yield f"{start}{name}  ({len(below)} tensor{'s' * (len(below) != 1)}, {size(sum(places.values()))})"
        else:
            yield f"{start}{name}"
            yield from _tree(entry, before + (gap if end else rail), glyphs, first, depth - 1)


def _below(level: dict[str, Any]) -> Iterator[Leaf]:
    for entry in level.values():
        yield from (entry,) if isinstance(entry, Leaf) else _below(entry)


def _leaf(leaf: Leaf, first: dict[int, str]) -> str:
    text = f"{leaf.dtype_name} {list(leaf.shape)}"
    if leaf.nbytes and first.get(leaf.offset, leaf.name) != leaf.name:
        return f"{text}  = {first[leaf.offset]}"
    return f"{text}  {size(leaf.nbytes)}" + (", cast" if leaf.cast else "")


def _leaves(manifest: Manifest | None) -> list[dict[str, object]] | None:
    if manifest is None:
        return None
    shared = ties(manifest)
    return [
        {
            "name": leaf.name,
            "dtype": leaf.dtype_name,
            "shape": list(leaf.shape),
            "bytes": leaf.nbytes,
            "offset": leaf.offset,
            "tied": [name for name in shared.get(leaf.offset, []) if name != leaf.name] if leaf.nbytes else [],
        }
        for leaf in manifest.leaves
    ]


def _head(page: Page, seen: ArenaSeen, rate: float | None, measured: float) -> None:
    page.wrapped(f"arena {seen.name}", "")
    who = seen.owner.value + ("" if seen.pid is None else f", pid {seen.pid}")
    page.wrapped(who, "           ", "  owner    ")
    if seen.pid and (text := command_of(seen.pid)):
        page.line(page.cut(f"  command  {text}"))
    if seen.why:
        page.wrapped(f"{seen.why}", "           ")
    if seen.readable:
        gate = ", closed to new sections while it is written" if seen.gated and seen.state == "open" else ""
        page.wrapped(f"{seen.state}{gate}", "           ", "  state    ")
        page.wrapped(f"{seen.version}, {per_second(rate, measured)} a second", "           ", "  version  ")
        page.wrapped(f"{size(seen.bytes)}: {len(seen.slots)} x {size(seen.slot_bytes)}", "           ", "  memory   ")
        page.line(page.cut(f"  session  {seen.session}"))
    page.line(f"  age      {duration(seen.age)}")


def _slot(slot: SlotSeen) -> str:
    if slot.unfinished:
        return f"version {slot.version}, being written, or given up half way"
    return ("never written" if not slot.version else f"version {slot.version}") + (", current" if slot.current else "")


def _readers(seen: ArenaSeen) -> list[list[str]]:
    ordered = sorted(seen.readers, key=lambda reader: (reader.worker is None, reader.worker or 0, reader.pid))
    return [
        [
            "-" if reader.worker is None else str(reader.worker),
            str(reader.pid),
            reader.condition.value,
            str(reader.acked),
            str(reader.lag),
            "-" if reader.pinned is None else str(reader.pinned),
            duration(reader.pin_age) if reader.pinned is not None else "-",
            str(reader.reads),
            str(reader.torn),
            str(reader.retries),
            command_of(reader.pid) if reader.condition is not Condition.UNKNOWN else "",
        ]
        for reader in ordered
    ]
