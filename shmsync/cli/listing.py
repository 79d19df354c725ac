"""`shmsync list`: the arenas on this machine. `shmsync gc`: remove what killed publishers left."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict
from typing import Any

from ..errors import ArenaNotFound, ShmSyncError
from ..memory import leftovers
from ..memory.inspection import ArenaSeen, command_of, look_at_all
from ..memory.process import Peers, ProcessState
from .output import duration, say, size, table

HEAD: tuple[str, ...] = ("NAME", "OWNER", "PID", "SIZE", "SLOTS", "VERSION", "READERS", "AGE")


def look(name: str | None = None) -> list[ArenaSeen]:
    """This arena, or all. Raises ArenaNotFound for a name that there is not; it lists those that there are."""
    with closing(Peers()) as peers:
        found = look_at_all(None if name is None else [name], peers)
    if name is not None and not found:
        raise ArenaNotFound(f"there is no arena {name!r}; there are: {', '.join(leftovers.names()) or 'none'}")
    return found


def _as_dict(seen: ArenaSeen) -> dict[str, Any]:
    """One arena for JSON; None where something is not known."""
    found = asdict(seen) | {"command": command_of(seen.pid) if seen.pid else ""}
    del found["at"]
    if not seen.readable:
        found |= dict.fromkeys(("version", "state", "bytes", "slot_bytes", "max_readers", "session", "gated"))
    for reader in found["readers"]:
        known = reader["state"] is not ProcessState.UNKNOWN  # else the pid is another process here
        reader["command"] = command_of(reader["pid"]) if known else ""
    return found


def cells(seen: ArenaSeen) -> list[str]:
    """What HEAD names of one arena."""
    pid = "-" if seen.pid is None else str(seen.pid)
    inside = ["-"] * 4
    if seen.readable:
        stopped = sum(reader.state is ProcessState.STOPPED for reader in seen.readers)
        readers = f"{len(seen.readers)} ({stopped} stopped)" if stopped else str(len(seen.readers))
        inside = [size(seen.bytes), str(len(seen.slots)), str(seen.version), readers]
    return [seen.name, seen.owner.value, pid, *inside, duration(seen.age)]


def run_list(arguments: argparse.Namespace) -> int:
    """Carry out `list`."""
    found = look()
    if arguments.json:
        say(json.dumps({"arenas": [_as_dict(each) for each in found]}))
        return 0
    if not found:
        say("no arenas")
        return 0
    table(HEAD, [cells(seen) for seen in found], right=range(2, len(HEAD)))
    for seen in found:
        for text in filter(None, (seen.why, seen.failure)):
            say()
            say(f"{seen.name}: {text}")
    return 0


def run_gc(arguments: argparse.Namespace) -> int:
    """Carry out `gc`."""
    for seen in look():
        process = f", process {seen.pid}" if seen.pid else ""
        why = f" ({seen.why.partition(';')[0]}{process})" if seen.owner is ProcessState.DEAD and seen.why else ""
        if not arguments.dry_run:
            try:
                leftovers.sweep(seen.name)
                say(f"removed {seen.name}{why}")
            except ShmSyncError as error:
                say(f"kept {seen.name}: {error}")
        elif seen.owner is ProcessState.DEAD:
            say(f"would remove {seen.name}{why}")
        elif seen.pid is not None and seen.owner in (ProcessState.LIVE, ProcessState.STOPPED):
            say(f"would keep {seen.name}: process {seen.pid} is {seen.owner.value}")
        else:
            say(f"would keep {seen.name}: {seen.why}")
    return 0
