"""`shmsync list`: the arenas on this machine."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from ..memory.inspection import ArenaSeen, Condition, command_of
from .measures import look_twice
from .output import Commands, Page, command, duration, per_second, seconds, size

_EXAMPLES = """
shmsync list
shmsync list -v                              commands and conditions of the processes too
shmsync list --json --interval 0 | jq '.arenas[].name'
"""
_HEAD = ("NAME", "OWNER", "PID", "SIZE", "SLOTS", "VERSION", "VERS/S", "READERS", "AGE")


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "list", "the arenas on this machine, and who publishes them", _EXAMPLES)
    made.add_argument("-v", "--verbose", action="store_true", help="command lines, sessions and readers too")
    made.add_argument("--json", action="store_true", help="for programs; times in seconds, sizes in bytes")
    made.add_argument(
        "--interval",
        type=seconds(),
        default=0.5,
        metavar="S",
        help="count versions for so many seconds (0.5); 0: do not count",
    )
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    found = look_twice(arguments.interval)
    page = Page()
    if arguments.json:
        page.line(json.dumps({"arenas": [as_dict(*each) for each in found], "measured_s": arguments.interval}))
        return 0
    if not found:
        page.line("no arenas")
        return 0
    page.table(_HEAD, [_row(seen, rate, arguments.interval) for seen, rate in found], right=range(2, len(_HEAD)))
    for seen, _ in found:
        if arguments.verbose or seen.why:
            _details(page, seen, arguments.verbose)
    return 0


def as_dict(seen: ArenaSeen, rate: float | None) -> dict[str, Any]:
    """One arena for JSON; None where something is not known."""
    found = asdict(seen) | {"versions_per_s": rate, "command": command_of(seen.pid) if seen.pid else ""}
    del found["at"]
    if not seen.readable:
        found |= dict.fromkeys(("version", "state", "bytes", "slot_bytes", "max_readers", "session", "gated"))
    for reader in found["readers"]:
        known = reader["condition"] is not Condition.UNKNOWN  # else the pid is another process here
        reader["command"] = command_of(reader["pid"]) if known else ""
    return found


def _row(seen: ArenaSeen, rate: float | None, measured: float) -> list[str]:
    pid = "-" if seen.pid is None else str(seen.pid)
    slots, version, readers = str(len(seen.slots)), str(seen.version), str(len(seen.readers))
    inside = [size(seen.bytes), slots, version, per_second(rate, measured), readers]
    if not seen.readable:
        inside = ["-"] * len(inside)
    return [seen.name, seen.owner.value, pid, *inside, duration(seen.age)]


def _details(page: Page, seen: ArenaSeen, verbose: bool) -> None:
    page.line()
    page.wrapped(f"{seen.name}: {seen.why}" if seen.why else seen.name, "")
    if not verbose:
        return
    if seen.pid and (text := command_of(seen.pid)):
        page.line(page.cut(f"  command  {text}"))
    if seen.readable:
        page.line(page.cut(f"  session  {seen.session}"))
        page.line(page.cut(f"  state    {seen.state}"))
        page.line(page.cut(f"  readers  {_summary(seen)}"))


def _summary(seen: ArenaSeen) -> str:
    counted = Counter(reader.condition.value for reader in seen.readers)
    parts = [f"{number} {what}" for what, number in counted.items()]
    late = [reader for reader in seen.readers if reader.lag]
    if late:
        parts.append(f"{len(late)} behind, the last by {max(reader.lag for reader in late)}")
    return f"{len(seen.readers)} of {seen.max_readers} rows" + (f" ({', '.join(parts)})" if parts else "")
