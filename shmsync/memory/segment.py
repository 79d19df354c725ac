"""The control segment: a small named shared-memory object that tells where the slab is and which version is current.

It gets its name when it is ready: no process ever finds one that is half made, and a publisher that is killed before
leaves nothing. What one that is killed later leaves, and its lock, are in leftovers.py. The reader table in it is
native (native/src/reader_table.cpp); Python sees a Row for each subscriber.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _native
from ..errors import ArenaCorrupt, ArenaExists, ArenaNotFound, WriterDied
from .leftovers import Dead, log_removed, new_name, sweep_some, taken
from .manifest import Manifest
from .process import Peer, ProcessState, close, close_in_children, hold_for_life, me, pid_of, refusals
from .segment_file import (
    FOLDER,
    NAME,
    check_ours,
    opened,
    path_of,
    read_header,
    read_manifest,
    unlink,
)

_LOOK_FOR_NAME = 0.001  # seconds between two looks for an arena that does not exist yet


class Handle(NamedTuple):
    """What a worker needs to attach; pickles, so it goes into Process(args=...).

    Attributes:
        name: of the arena.
        session: the random id of its publisher's life.
    """

    name: str
    session: bytes


RowId = tuple[int, int]  # (number, owner): a row of the reader table, for as long as it has this owner


@dataclass(frozen=True)
class ReaderInfo:
    """One subscriber, as its row in the reader table shows it.

    Attributes:
        worker: the index given to Subscriber(worker=).
        pid: of its process.
        state: whether that process runs, is stopped or dead.
        acked: the version it has applied; 0: none yet.
        lag: published versions that it has not applied.
        pinned: the version it holds in a read section right now.
        pin_age: since when, in seconds; 0 when it holds none.
        reads: sections entered.
        torn: optimistic or live sections whose weights changed meanwhile.
        retries: entries begun again because the writer moved on meanwhile (a wait at a closed gate is none), and torn
            sections that run(), snapshot() or a bound module repeated.
    """

    worker: int | None
    pid: int
    state: ProcessState
    acked: int
    lag: int
    pinned: int | None
    pin_age: float
    reads: int
    torn: int
    retries: int

    @classmethod
    def of(cls, row: _native.Row, version: int, state: ProcessState) -> ReaderInfo:
        """What this row shows; `version`: the published one."""
        lag = max(0, version - row.acked)
        figures = row.acked, lag, row.pinned, row.pin_age, row.reads, row.torn, row.retries
        return cls(row.worker, row.pid, state, *figures)


def check_name(name: str) -> str:
    """Return the name; raise ValueError when it cannot be part of a file name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"arena names are 1 to 200 of A-Z a-z 0-9 . _ - and start with a letter or digit, not {name!r}"
        )
    return name


# Making one.


@dataclass(eq=False)
class Created:
    """A publisher's segment, which it holds locked. It has no name before make_ready()."""

    control: _native.Control
    name: str
    follows: int  # the last version of the dead publisher that has this name; 0: of none
    lock: int | None  # a descriptor that no mapping shares

    def __post_init__(self) -> None:
        close_in_children(self, Created.unlock)

    def unlock(self) -> None:
        """Give the lock back. Idempotent."""
        if self.lock is not None:
            close(self.lock)
            self.lock = None


def last_version(name: str) -> int:
    """The last version of the dead publisher that has this name; 0: of none. Raises ArenaExists if it may live."""
    with _ours(name) as dead:
        return 0 if dead is None else dead.version


@contextmanager
def _ours(name: str) -> Iterator[Dead | None]:
    """As taken(), for a publisher that is to have this name. Raises ArenaExists."""
    try:
        with taken(name) as dead:
            yield dead
    except (ArenaExists, ArenaNotFound, ArenaCorrupt) as error:
        ranks = os.environ.get("WORLD_SIZE", "1") != "1"  # torchrun, or torch.distributed
        cure = "; each rank runs this program: publish from one rank" if ranks else ""
        raise ArenaExists(f"the name of arena {name!r} is taken: {error}, or use another name{cure}") from error


def create(name: str, size: int, *, follows: int, **header: Any) -> Created:
    """Make the segment of an arena; sweeps what dead publishers left. Raises OSError. `follows`: last_version()."""
    sweep_some()
    fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # ftruncate alone would leave a SIGBUS for later
        control = _native.Control.create(fd=fd, **header)
        lock = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        created = Created(control, name, follows, lock)
        try:
            hold_for_life(lock)
        except BaseException:
            created.unlock()
            raise
        return created
    finally:
        close(fd)


def make_ready(created: Created) -> None:
    """Give the segment its name: subscribers attach from now on.

    That of a dead publisher is replaced in one step, so that the number of its last version is never lost. Raises
    ArenaExists when another publisher has got the name since.
    """
    created.control.make_ready()
    with refusals(f"naming arena {created.name!r}"), _ours(created.name) as dead:
        if dead is None:
            _named(created, created.name)
            return
        if dead.version != created.follows:
            raise ArenaExists("another publisher has had it meanwhile; start this one again")
        beside = new_name()
        _named(created, beside)
        os.rename(path_of(beside), path_of(created.name))
        log_removed(created.name)


def _named(created: Created, name: str) -> None:
    """Let a free name stand for the segment."""
    try:
        os.link(f"/proc/self/fd/{created.lock}", path_of(name), src_dir_fd=created.lock)  # else it links the link
    except FileExistsError:
        raise ArenaExists("another publisher has got it just now; close it there") from None


def withdraw(created: Created) -> None:
    """Remove the name if it still stands for this segment, and give the lock back. Idempotent."""
    if created.lock is not None:
        try:
            unlink(created.name, os.fstat(created.lock))
        except OSError as error:
            warnings.warn(
                f"arena {created.name!r} is closed, but its control segment stays in {FOLDER}: {error}; `shmsync gc` "
                "removes it when this process has ended",
                ResourceWarning,
                stacklevel=2,
            )
    created.unlock()


# Attaching to one.


class Attachable(NamedTuple):
    """The segment of a live publisher, checked and mapped."""

    control: _native.Control
    header: _native.Header
    manifest: Manifest


def attach(name: str, session: bytes | None, deadline: float) -> Attachable:
    """Map the segment of a live arena, after checking all of its header, and its manifest.

    `session`: the handle's. None accepts any, and waits until there is one; a handle's arena was there already.
    """
    check_name(name)
    began = time.monotonic()
    while True:
        with opened(name) as fd:
            if fd is not None:
                return _checked(name, session, fd)
        now = time.monotonic()
        if session is not None or now >= deadline:
            raise ArenaNotFound(_no_arena(name, session, now - began))
        time.sleep(max(0.0, min(_LOOK_FOR_NAME, deadline - now)))


def _checked(name: str, session: bytes | None, fd: int) -> Attachable:
    header, here = read_header(name, fd), me()
    if session is not None and header.session != session:
        raise ArenaNotFound(
            f"arena {name!r} is session {header.session.hex()} but the handle is of session {session.hex()}; the "
            "publisher was restarted, pass the new handle"
        )
    check_ours(name, fd)
    manifest = read_manifest(name, fd, header)
    for what in ("boot_id", "pid_namespace"):
        found, needed = getattr(header, what), getattr(here, what)
        if found != needed:
            raise ArenaNotFound(
                f"arena {name!r} has {what.replace('_', ' ')} {found!r} but {needed!r} is needed; run both in "
                "one container or virtual machine, or let the containers share processes (docker run "
                "--pid=container:NAME, shareProcessNamespace in Kubernetes)"
            )
    if Peer(owner=header.owner).dead:
        raise WriterDied(f"the publisher of arena {name!r} (pid {pid_of(header.owner)}) is dead; start it again")
    return Attachable(_native.Control.attach(fd, header), header, manifest)


def session_of(name: str) -> bytes | None:
    """The session of the arena of this name; None when there is none."""
    with suppress(ArenaCorrupt), opened(name) as fd:
        return None if fd is None else read_header(name, fd).session
    return None


def _no_arena(name: str, session: bytes | None, waited: float) -> str:
    if session is not None:
        return (
            f"there is no arena {name!r} any more: its publisher was closed or has died, or a cleaner has removed the "
            "segment of one that lives; start it again. `shmsync doctor` names a usual cleaner"
        )
    return (
        f"there is no arena {name!r}, after waiting {waited:.3g} s for it; start its publisher, check the name, or "
        "give more time with timeout="
    )
