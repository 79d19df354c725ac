"""`shmsync gc`: remove what killed publishers left."""

from __future__ import annotations

from ..errors import ShmSyncError
from ..memory import leftovers
from ..memory.observed import ArenaSeen, Condition, look
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
    made.set_defaults(run=lambda arguments: _dry_run() if arguments.dry_run else _run())


def _run() -> int:
    page = Page()
    for name in leftovers.names():
        try:
            owner = leftovers.sweep(name)
        except ShmSyncError as error:
            page.line(f"kept {name}: {error}")
            continue
        kept = f"process {owner} is alive" if owner else "another process is making or removing it"
        page.line(f"removed {name}" if owner is None else f"kept {name}: {kept}")
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


def _verdict(seen: ArenaSeen) -> str:
    if seen.owner is Condition.DEAD:
        return f"would remove {seen.name}"
    if seen.owner in (Condition.ALIVE, Condition.STOPPED):
        return f"would keep {seen.name}: process {seen.pid} is {seen.owner.value}"
    return f"would keep {seen.name}: {seen.why}"
