"""`shmsync gc`: remove what killed publishers left."""

from __future__ import annotations

import argparse
from contextlib import closing

from ..errors import ShmSyncError
from ..memory import leftovers
from ..memory.inspection import ArenaSeen, Condition, look
from ..memory.process import Peers
from .output import Commands, Page, command

_EXAMPLES = """
shmsync gc --dry-run                         what it would remove, and why the others stay
shmsync gc
"""


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "gc", "remove what killed publishers left in /dev/shm", _EXAMPLES)
    made.add_argument("--dry-run", action="store_true", help="remove nothing, and say what would be removed")
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    page = Page()
    with closing(Peers()) as peers:
        for name in leftovers.names():
            seen = look(name, peers)
            if seen is not None:
                page.line(_verdict(seen) if arguments.dry_run else _swept(seen))
    return 0


def _swept(seen: ArenaSeen) -> str:
    """Remove it if its owner is dead; what was done."""
    try:
        leftovers.sweep(seen.name)
    except ShmSyncError as error:
        return f"kept {seen.name}: {error}"
    return f"removed {seen.name}{_why(seen)}"


def _verdict(seen: ArenaSeen) -> str:
    if seen.owner is Condition.DEAD:
        return f"would remove {seen.name}{_why(seen)}"
    if seen.pid is not None and seen.owner in (Condition.ALIVE, Condition.STOPPED):
        return f"would keep {seen.name}: process {seen.pid} is {seen.owner.value}"
    return f"would keep {seen.name}: {seen.why}"


def _why(seen: ArenaSeen) -> str:
    """Why it may go, in brackets: what was seen before it went."""
    why = seen.why.partition(";")[0]
    process = f", process {seen.pid}" if seen.pid else ""
    return f" ({why}{process})" if seen.owner is Condition.DEAD and why else ""
