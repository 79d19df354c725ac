"""`shmsync inspect NAME`: weights, slots and readers of one arena."""

from __future__ import annotations

import argparse

from ..errors import ShmSyncError
from ..memory.inspection import ArenaSeen, SlotSeen, command_of, manifest_of, ties
from ..memory.manifest import Manifest
from ..memory.process import ProcessState
from ..memory.segment import ReaderInfo
from .listing import look
from .output import duration, say, size, table

HEAD: tuple[str, ...] = ("WORKER", "PID", "IS", "ACKED", "LAG", "PINNED", "FOR", "READS", "TORN", "RETRIES", "COMMAND")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    (seen,) = look(arguments.name)
    _head(seen)
    if not (seen.readable or arguments.digest):  # a digest that there is not is an error, below
        return 0
    say()
    try:
        _weights(manifest_of(seen.name))
    except ShmSyncError as error:
        say(f"weights: {error}")
    if arguments.digest:
        from ..engine.subscriber import Subscriber  # which imports torch

        with Subscriber(seen.name, consistency="optimistic") as sub:
            version, digests = sub.digest()
        say()
        say(f"digests of version {version}")
        for name, digest in digests.items():
            say(f"  {digest}  {name}")
    say()
    say("slots")
    for number, slot in enumerate(seen.slots):
        say(f"  {number}  {_slot(slot)}")
    say()
    say(f"readers: {len(seen.readers)} of {seen.max_readers} rows")
    if seen.readers:
        ordered = sorted(seen.readers, key=lambda reader: (reader.worker is None, reader.worker or 0, reader.pid))
        table(HEAD, [cells(reader) for reader in ordered], right=(0, 1, 3, 4, 5, 6, 7, 8, 9))
    return 0


def _head(seen: ArenaSeen) -> None:
    say(f"arena {seen.name}")
    say(f"  owner    {seen.owner.value}" + ("" if seen.pid is None else f", pid {seen.pid}"))
    if seen.pid and (text := command_of(seen.pid)):
        say(f"  command  {text}")
    for text in filter(None, (seen.why, seen.failure)):
        say(f"           {text}")
    if seen.readable:
        gate = ", closed to new sections while it is written" if seen.gated and seen.state == "open" else ""
        say(f"  state    {seen.state}{gate}")
        say(f"  version  {seen.version}")
        say(f"  memory   {size(seen.bytes)}: {len(seen.slots)} x {size(seen.slot_bytes)}")
        say(f"  session  {seen.session}")
    say(f"  age      {duration(seen.age)}")


def _weights(manifest: Manifest) -> None:
    tied = ties(manifest)
    more = f", {sum(map(len, tied.values()))} names of tied ones" if tied else ""
    say(f"weights: {len(manifest.leaves)} tensors, {size(manifest.used_bytes)}{more}")
    longest = max((len(leaf.name) for leaf in manifest.leaves), default=0)
    for leaf in manifest.leaves:
        first = tied.get(leaf.offset, [leaf.name])[0] if leaf.nbytes else leaf.name
        what = size(leaf.nbytes) + (", cast" if leaf.cast else "") if first == leaf.name else f"= {first}"
        say(f"  {leaf.name.ljust(longest)}  {leaf.dtype_name} {list(leaf.shape)}  {what}")


def _slot(slot: SlotSeen) -> str:
    if slot.unfinished:
        return f"version {slot.version}, being written, or given up half way"
    return ("never written" if not slot.version else f"version {slot.version}") + (", current" if slot.current else "")


def cells(reader: ReaderInfo) -> list[str]:
    """What HEAD names of one reader."""
    return [
        "-" if reader.worker is None else str(reader.worker),
        str(reader.pid),
        reader.state.value,
        *map(str, (reader.acked, reader.lag)),
        "-" if reader.pinned is None else str(reader.pinned),
        "-" if reader.pinned is None else duration(reader.pin_age),
        *map(str, (reader.reads, reader.torn, reader.retries)),
        command_of(reader.pid) if reader.state is not ProcessState.UNKNOWN else "",
    ]
