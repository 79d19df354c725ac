"""An arena as it is seen from outside: what its control segment says, and what the kernel says of its processes.

Nothing is written or claimed, and no process of the arena has to do anything for it: they may run, stand still or be
dead. What cannot be found out is said to be unknown, never to be dead or empty.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .. import _native
from ..errors import ArenaCorrupt, ArenaNotFound, ShmSyncError
from .leftovers import names as all_names
from .manifest import Manifest
from .process import Peers, ProcessState, me, pid_of, refusals
from .segment import ReaderInfo
from .segment_file import check_readable, may_live, opened, read_header, read_manifest


@dataclass(frozen=True)
class SlotSeen:
    """One slot: which version lies in it."""

    version: int  # 0: never written
    unfinished: bool  # that version is just being written, or was given up half way
    current: bool


@dataclass(frozen=True)
class ArenaSeen:
    """One arena at one moment."""

    name: str
    owner: ProcessState
    why: str  # what there is to say about the owner; "" for one that is well
    pid: int | None  # of the owner; None when it is not known
    age: float | None  # seconds since the segment was made
    at: float = field(default_factory=time.monotonic)  # when this was seen
    session: str = ""
    bytes: int = 0  # of the weights' memory, all slots
    slot_bytes: int = 0
    version: int = 0
    state: str = ""  # open, closed or poisoned
    failure: str = ""  # how a worker failed, the last that did
    gated: bool = False  # slots = 1: the publisher keeps new sections out
    max_readers: int = 0
    slots: tuple[SlotSeen, ...] = ()
    readers: tuple[ReaderInfo, ...] = ()

    @property
    def readable(self) -> bool:
        """Is there more to see than a name and an owner?"""
        return bool(self.slots)


_STATES = {0: "open", 1: "closed", 2: "poisoned"}


def look(name: str, peers: Peers) -> ArenaSeen | None:
    """The arena of this name now; None when there is none. Whatever prevents a look becomes a sentence in `why`."""
    try:
        with refusals(f"looking at arena {name!r}"), opened(name) as fd:
            return None if fd is None else _look(name, fd, peers)
    except ShmSyncError as error:
        return ArenaSeen(name, ProcessState.UNKNOWN, str(error), None, None)


def manifest_of(name: str) -> Manifest:
    """The manifest of an arena. Raises ArenaNotFound, ArenaCorrupt, NoSpace."""
    with refusals(f"looking at arena {name!r}"), opened(name) as fd:
        if fd is None:
            raise ArenaNotFound(f"there is no arena {name!r}; `shmsync list` shows those that there are")
        return read_manifest(name, fd, read_header(name, fd))


def command_of(pid: int) -> str:
    """The command line of a process, unless it is multiprocessing's; "" when it has none, or it may not be seen."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    found = " ".join(part for part in text.decode("utf-8", "backslashreplace").split("\0") if part)
    child = re.search(r"from multiprocessing\.(forkserver|spawn) import", found)
    return f"a {child[1]} process of multiprocessing" if child else found


def ties(manifest: Manifest) -> dict[int, list[str]]:
    """The names of the leaves that are one tensor, by their offset."""
    found: dict[int, list[str]] = {}
    for leaf in manifest.leaves:
        if leaf.nbytes:
            found.setdefault(leaf.offset, []).append(leaf.name)
    return {offset: names for offset, names in found.items() if len(names) > 1}


def _look(name: str, fd: int, peers: Peers) -> ArenaSeen:
    age = max(0.0, time.time() - os.fstat(fd).st_mtime)  # stores into a mapping of it do not count as changes
    header = read_header(name, fd)
    try:
        check_readable(name, header)
        seen = _native.Control.attach(fd, header).look()
    except ArenaCorrupt as error:
        owner = ProcessState.UNKNOWN if may_live(header, fd) else ProcessState.DEAD
        return ArenaSeen(name, owner, str(error), _pid(header), age)
    at = time.monotonic()
    owner, why = _owner(header, fd, peers)
    version = int(seen["version"])
    return ArenaSeen(
        name=name,
        owner=owner,
        why=why,
        pid=_pid(header),
        age=age,
        at=at,
        session=header.session.hex(),
        bytes=header.slots * header.slot_bytes,
        slot_bytes=header.slot_bytes,
        version=version,
        state=_STATES.get(seen["state"], f"state {seen['state']}"),
        failure=seen["failure"],
        gated=bool(seen["gated"]),
        max_readers=header.readers,
        slots=tuple(
            SlotSeen((seq + 1) // 2, bool(seq % 2), number == seen["slot"] and seq % 2 == 0)
            for number, seq in enumerate(seen["seqs"])
        ),
        readers=tuple(ReaderInfo.of(row, version, _state(row.owner, peers, header)) for row in seen["rows"]),
    )


def _pid(header: _native.Header) -> int | None:
    """The owner's pid; None in another pid namespace, where the number is another process."""
    return pid_of(header.owner) if header.pid_namespace == me().pid_namespace else None


def _owner(header: _native.Header, fd: int, peers: Peers) -> tuple[ProcessState, str]:
    if not may_live(header, fd):
        return ProcessState.DEAD, "its publisher is dead; `shmsync gc` removes what it left"
    if _pid(header) is None:  # its lock tells
        return ProcessState.LIVE, "its publisher runs in another container (pid namespace)"
    state = _state(header.owner, peers, header)
    stopped = "its publisher is stopped (SIGSTOP, or a debugger); `kill -CONT` lets it go on"
    return state, stopped if state is ProcessState.STOPPED else ""


def _state(owner: int, peers: Peers, header: _native.Header) -> ProcessState:
    if header.boot_id != me().boot_id:
        return ProcessState.DEAD
    return peers.state(owner) if header.pid_namespace == me().pid_namespace else ProcessState.UNKNOWN


def look_at_all(names: Iterable[str] | None, peers: Peers) -> list[ArenaSeen]:
    """Every arena of these names (None: of all) that is still there. Raises NoSpace, see names()."""
    asked = all_names() if names is None else names
    return [seen for name in asked if (seen := look(name, peers)) is not None]
