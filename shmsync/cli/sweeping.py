"""`shmsync gc`: remove what killed publishers left."""

from __future__ import annotations

from ..errors import ShmSyncError
from ..memory.control import leftovers
from ..memory.inspection import ArenaSeen, Condition, look
from ..memory.system.process import Peers
from .output import Commands, Page, command

_EXAMPLES = """
shmsync gc --dry-run                         what it would remove, and why the others stay
shmsync gc
"""


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "gc", "remove what killed publishers left in /dev/shm", _EXAMPLES)
    made.add_argument("--dry-run", action="store_true", help="remove nothing, and say what would be removed")
    made.set_defaults(run=lambda arguments: _dry_run() if arguments.dry_run else _run())


def _run() -> int:
    page, peers = Page(), Peers()
    try:
        for name in leftovers.names():
            seen = look(name, peers)
            if seen is None:
                continue
            try:
                owner = leftovers.sweep(name)
            except ShmSyncError as error:
                page.line(f"kept {name}: {error}")
                continue
            kept = f"process {owner} is alive" if owner else "another process is making or removing it"
            page.line(f"removed {name}{_why(seen)}" if owner is None else f"kept {name}: {kept}")
    finally:
        peers.close()
    return 0


def _dry_run() -> int:
    page, peers = Page(), Peers()
    try:
        for name in leftovers.names():
            seen = look(name, peers)
            if seen is not None:
                page.line(_verdict(seen))
    finally:
        peers.close()
    return 0


def _why(seen: ArenaSeen) -> str:
    """Why it may go, in brackets: what was seen before it went."""
    why = seen.why.partition(";")[0]
    process = f", process {seen.pid}" if seen.pid else ""
    return f" ({why}{process})" if seen.owner is Condition.DEAD and why else ""


def _verdict(seen: ArenaSeen) -> str:
    if seen.owner is Condition.DEAD:
        return f"would remove {seen.name}{_why(seen)}"
    if seen.owner in (Condition.ALIVE, Condition.STOPPED):
        return f"would keep {seen.name}: process {seen.pid} is {seen.owner.value}"
    return f"would keep {seen.name}: {seen.why}"
