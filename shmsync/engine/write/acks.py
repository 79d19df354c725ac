"""Waiting until workers are attached, or have applied a version, and naming those that have not.

RowWait is one wait over the reader table: until the rows that a call asks about are done, or their processes are dead.
Acks and attachment wait here; each says when a row is done, and how to sleep between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

from ... import _native
from ...errors import ClosedError
from ...memory.process import Peer, Peers, ProcessState, owner_word, pid_of, stay_if_exiting
from ...memory.segment import RowId
from ..deadlines import check_worker, slice_until
from ..outcome import Outcome, Wording
from .slot_writer import SlotWriter

Procs = Sequence[Any] | Mapping[int, Any] | None

_NAP = 0.0005  # seconds between two looks, where nothing wakes the wait


class RowWait:
    """The rows that a call asks about, as they were at the last look.

    Args:
        asked: the rows, for as long as their owners keep them.
        workers: instead of rows, the indices of workers, attached or not.
        done: has this row, which may be given back already, done what it is asked for? None: to be attached is enough,
            and lasts as long as its process lives.
        dead: processes that died before, by their rows, with the names that errors give them.
        peer_of: the process of a worker, if it is known.

    Attributes:
        done: the rows that were done, by name.
        late: the rows of living processes that are not done.
        absent: the workers that have no row.
        over: those of them whose process has ended, so that they never will; that ends the wait.
    """

    def __init__(
        self,
        control: _native.Control,
        peers: Peers,
        asked: Iterable[RowId],
        workers: list[int] | None,
        done: Callable[[_native.Row], bool] | None,
        dead: Mapping[RowId, int | str] | None = None,
        peer_of: Callable[[int], Peer | None] | None = None,
    ) -> None:
        self._control, self._peers, self._is_done = control, peers, done
        self._asked, self._workers = set(asked), workers
        self._dead = dict(dead or {})
        self._peer_of = peer_of or (lambda worker: None)
        self.done: dict[int | str, _native.Row] = {}
        self.late: list[RowId] = []
        self.absent: list[int] = []
        self.over: dict[int, Peer] = {}

    def until(
        self, deadline: float, check: Callable[[], None], nap: Callable[[], object], *, napped: bool = False
    ) -> None:
        """Wait until no row is late and no worker absent, at most until the deadline.

        `check` raises what else should end the wait; `nap` sleeps until the next look; `napped`: the caller has slept.
        """
        waiting = self._look(deaths=napped)  # to find a death costs system calls, and most rows are done after one nap
        while waiting:
            nap()
            waiting = self._look(deaths=True)
            if waiting:
                check()
                if time.monotonic() >= deadline:
                    return

    @property
    def dead(self) -> dict[RowId, int | str]:
        """The rows of processes that died, where no other process has taken the worker's place."""
        late = {self._control.name_of(row) for row in self.late}
        return {row: name for row, name in self._dead.items() if name not in self.done and name not in late}

    def outcome(self, wording: Wording) -> Outcome:
        """What the last look has found, for an error."""
        outcome = Outcome(wording)
        outcome.dead = dict.fromkeys(self.dead.values(), "")
        if self.over:  # the others had no time
            outcome.dead |= {worker: str(peer) for worker, peer in self.over.items()}
            return outcome
        owners = {self._control.name_of(row): row[1] for row in self.late}
        outcome.late = list(owners)
        outcome.pids = {name: pid_of(owner) for name, owner in owners.items()}
        outcome.stopped = [name for name, owner in owners.items() if self._peers.state(owner) is ProcessState.STOPPED]
        outcome.add_late({worker: self._peer_of(worker) for worker in self.absent})
        outcome.absent = [] if self._is_done is None else list(self.absent)
        return outcome

    def _look(self, *, deaths: bool) -> bool:
        """Look at all rows once. Is there anything to wait for?"""
        # Before the rows: what these say of a process that has ended is final.
        ended = {worker: peer for worker in self.absent if (peer := self._peer_of(worker)) is not None and peer.dead}
        if self._is_done is None:
            self.done.clear()
        self.late = []
        for row in self._control.rows(left=True):
            if self._asks(row) and not self._is_over(row, deaths):
                self.late.append(row.id)
        known = {*self.done, *self._dead.values(), *map(self._control.name_of, self.late)}
        self.absent = [worker for worker in self._workers or () if worker not in known]
        self.over = {worker: ended[worker] for worker in self.absent if worker in ended}
        return bool(self.late or self.absent) and not self.over

    def _asks(self, row: _native.Row) -> bool:
        if row.id in self._dead:
            return False
        if self._workers is None:  # also a process that has replaced a dead worker
            return row.id in self._asked or row.worker in self._dead.values()
        return row.worker in self._workers

    def _is_over(self, row: _native.Row, deaths: bool) -> bool:
        """Is there nothing to wait for in this row, since it is done, given back, or its process is dead?"""
        if self._is_done is None:
            if row.owner and self._peers.alive(row.owner):
                self.done[row.name] = row
            return True
        if self._is_done(row):
            self.done[row.name] = row
            return True
        if row.owner == 0:
            return True
        if not deaths or self._peers.alive(row.owner):
            return False
        last = self._control.row(row.number)  # it may have done it after the look, and then died
        if last.owner != row.owner or self._is_done(last):
            return False  # the next look finds out
        self._dead[row.id] = row.name
        return True


_ACKS = Wording(
    "a worker applies at its next read section or refresh()",
    sent="is published",
    died="ended",
    after_death='The others have it. Start them again, or go on without them: wait="all" leaves them out, a list must '
    "not name them, and workers.alive lists those of Workers that run",
    after_lateness="A worker that is merely late still applies it; give more time with timeout=. One that is idle, or "
    "waits for this process at a full queue, never does: let it call refresh(), empty the queue first, or publish "
    "without wait=",
    after_stop=", and workers.restart(rank) starts another one of Workers",
)


Acks: TypeAlias = Literal["all"] | list[int]  # whose acks a call waits for: those attached now, or these workers'


class WorkerWatch(NamedTuple):
    """How the calls that write learn that a process of Workers has ended or failed; workers/pool.py has the calls.

    The reader table shows deaths, but neither exceptions nor exit codes.

    Attributes:
        look: called in each slice of a wait for acks, and at its end, with the workers that it has found ended. Starts
            the dead again that may be; raises what a worker failed with, or WorkerDied for one that stays dead.
        before_write: called before each version is written. Raises as look() does.
        peer_of: the process of a worker, if it is one of Workers.
    """

    look: Callable[[Collection[int | str]], None]
    before_write: Callable[[], None]
    peer_of: Callable[[int | str], Peer | None]


class AckingWorkers:
    """The workers that apply one writer's versions, as calls that write see them.

    Args:
        slots: which are written.

    Attributes:
        watch: how calls that write learn of failures of Workers, which set it.
    """

    def __init__(self, slots: SlotWriter) -> None:
        self._slots, self._control = slots, slots.arena.control
        self.watch: WorkerWatch | None = None

    def wait(self, version: int, acks: Acks, deadline: float) -> None:
        """Wait until the workers have acked `version`. Those that a list names may attach meanwhile.

        A worker that leaves meanwhile is not waited for, unless it was named and had not acked.

        Raises WorkerDied as soon as only dead ones are left to wait for, or a named one of Workers has ended and left
        no ack; AckTimeout at the deadline; ClosedError. Or what Workers know of a failure or a death in its place.
        """
        peers = self._slots.peers
        try:
            while again := self._wait_for_acks(version, acks, deadline):
                if acks == "all":
                    break
                acks = [worker for worker in acks if worker not in again]  # the others may have had no time
            self._look()
        finally:
            if len(peers):  # a worker was late; rows that were given back need no pidfd any more
                peers.keep_only({row.owner for row in self._control.rows()})

    def _look(self) -> None:
        stay_if_exiting()
        if self.watch is not None:
            self.watch.look(())

    def _wait_for_acks(self, version: int, acks: Acks, deadline: float) -> list[int | str]:
        """As wait(); the workers that have died meanwhile, and were started again."""
        slots, native, control, watch = self._slots, self._slots.native, self._control, self.watch
        what, workers = f"version {version}", None if acks == "all" else acks
        asked: list[RowId] = []
        if workers is None:
            asked = native.wait_acks(version, native.claimed_rows(), slice_until(deadline))
            if not asked:
                return []  # the common case, without a look in Python
        # Those that this call has reaped already, while it waited for their pins.
        named = {row: name for row, name in slots.died.items() if workers is not None and name in workers}
        peer_of = None if watch is None else watch.peer_of
        # Nothing newer is published meanwhile, so an ack of a later version is garbage.
        rows = RowWait(control, slots.peers, asked, workers, lambda row: row.acked == version, named, peer_of)

        def nap() -> None:
            if rows.late:
                native.wait_acks(version, rows.late, slice_until(deadline))
            else:
                time.sleep(_NAP)  # a named worker is not attached yet

        def check() -> None:
            self._look()
            if slots.closing:
                raise ClosedError(
                    f"{what} is published, but arena {slots.name!r} was closed by another thread in the wait for its "
                    "acks; workers that are attached still apply it. Close it after the wait",
                    version=version,
                    missing=rows.outcome(_ACKS).late,
                )

        rows.until(deadline, check, nap, napped=bool(asked))
        for row in rows.dead:
            control.reap(*row, slots.me)  # the next publish does not wait for it
        outcome = rows.outcome(_ACKS)
        if outcome.late:
            raise outcome.lateness(what, version)
        ended = list(outcome.dead)
        if ended and watch is not None:
            watch.look(ended)
            if self.watch is None:  # they were ended on purpose
                return ended
            peers = {worker: watch.peer_of(worker) for worker in ended}
            gone = [worker for worker, peer in peers.items() if peer is None or peer.dead]
            if not gone:
                return ended  # they run again
            known = rows.outcome(_ACKS).dead  # now with exit codes
            outcome.dead = {worker: known[worker] for worker in gone}
        outcome.check(what, version)
        return []

    def forget(self, worker: int) -> None:
        """Another process is `worker` from now on; what those before it applied, who are gone, is not its doing."""
        control, mine = self._control, self._slots.me
        for row in control.rows(left=True):
            if row.worker != worker:
                continue
            if row.owner == 0 or (not self._slots.peers.alive(row.owner) and control.reap(*row.id, mine)):
                control.forget(row.number, mine)

    def free_rows_of(self, pid: int) -> None:
        """This process was ended on purpose: its rows are no deaths that a later wait should report."""
        for row in self._control.rows():
            if pid_of(row.owner) == pid and not self._slots.peers.alive(row.owner):
                self._control.reap(*row.id, self._slots.me)


_ATTACHED = Wording(
    "a worker is attached when its Subscriber, with this worker=, is made",
    sent="is published",
    died="ended",
    after_death="Start it again, and look for its own error",
    after_lateness="Is it still starting? Give more time with timeout=, and pass procs= to learn of deaths at once",
    do="attach",
    doing="attaching",
)


def check_workers(workers: Iterable[int]) -> list[int]:
    """The indices as a list. Raises TypeError, ValueError."""
    if isinstance(workers, (str, bytes)) or not isinstance(workers, Iterable):
        raise TypeError(f"workers is a list of worker indices, not {workers!r}")
    return [check_worker(worker) for worker in workers]


def processes_of(workers: list[int], procs: Procs) -> dict[int, Peer]:
    """The process of each worker, as far as they were given: in the order of `workers`, or by index.

    Raises TypeError and ValueError.
    """
    if procs is None:
        return {}
    if not isinstance(procs, Mapping):
        if isinstance(procs, (str, bytes)) or not isinstance(procs, Sequence):
            raise TypeError(
                f"procs is a list of processes in the order of workers, or a mapping by worker, not {procs!r}"
            )
        if len(procs) != len(workers):
            raise ValueError(
                f"procs has {len(procs)} processes for {len(workers)} workers; pass one for each, in their order, or a "
                "mapping by worker"
            )
        procs = dict(zip(workers, procs, strict=True))
    unknown = [worker for worker in procs if worker not in workers]
    if unknown:
        raise ValueError(f"procs names {unknown}, but the workers to wait for are {workers}")
    return {worker: as_peer(process) for worker, process in procs.items()}


def as_peer(process: Any) -> Peer:
    """A multiprocessing.Process, a subprocess.Popen or a pid as a Peer. Raises TypeError for anything else."""
    if isinstance(process, Integral) and not isinstance(process, bool):
        try:
            return Peer(owner=owner_word(int(process)))
        except (FileNotFoundError, ProcessLookupError):
            return Peer(process=SimpleNamespace(pid=int(process), exitcode=0))  # no process has this pid any more
    if hasattr(process, "exitcode") and hasattr(process, "pid"):
        return Peer(process=process)
    if hasattr(process, "poll") and hasattr(process, "pid"):
        return Peer(process=_Child(process.pid, process))
    raise TypeError(f"a process is a multiprocessing.Process, a subprocess.Popen or a pid, not {process!r}")


class _Child(NamedTuple):
    """A subprocess.Popen, asked as a multiprocessing.Process is."""

    pid: int
    popen: Any

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()


def wait_for_readers(
    control: _native.Control,
    version: int,
    workers: list[int],
    procs: dict[int, Peer],
    deadline: float,
    check: Callable[[], None],
) -> None:
    """Wait until live subscribers of these workers are attached. `check` raises what else ends the wait.

    Raises WorkerDied as soon as the process of one that is not attached has ended, AckTimeout at the deadline,
    ClosedError.
    """
    peers = Peers()
    try:
        rows = RowWait(control, peers, (), workers, done=None, peer_of=procs.get)
        rows.until(deadline, check, lambda: time.sleep(4 * _NAP))
        rows.outcome(_ATTACHED).check(f"version {version}", version)
    finally:
        peers.close()
        for peer in procs.values():
            peer.close()
