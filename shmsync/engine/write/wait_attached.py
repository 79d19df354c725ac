"""Waiting until workers are attached, and noticing that one of them died before it could."""

from __future__ import annotations

import select
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from numbers import Integral
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...memory.system.process import Peer, Peers, owner_word
from ..deadlines import check_worker
from ..outcome import Outcome, Wording
from ..row_wait import RowWait

if TYPE_CHECKING:
    from .writer import Writer

Procs = Sequence[Any] | Mapping[int, Any] | None

_NAP = 2  # ms between two looks at the reader table; a death ends a nap
_WORDING = Wording(
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
    return {worker: _peer(process) for worker, process in procs.items()}


def _peer(process: Any) -> Peer:
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


def wait_for_readers(writer: Writer, workers: list[int], procs: dict[int, Peer], deadline: float) -> None:
    """Wait until live subscribers of these workers are attached.

    Raises WorkerDied as soon as the process of one that is not attached has ended, AckTimeout at the deadline,
    ClosedError.
    """
    version = writer.current[0]
    what = f"version {version}"
    with ExitStack() as stack:
        peers = stack.enter_context(closing(Peers()))
        for peer in procs.values():
            stack.callback(peer.close)
        rows = RowWait(writer.arena.control, peers, (), workers, done=None)
        poller = select.poll()

        def nap() -> None:
            for worker in rows.absent:
                fd = procs[worker].fd if worker in procs else None
                if fd is not None:
                    poller.register(fd, select.POLLIN)
            poller.poll(_NAP)

        def look() -> None:
            outcome = Outcome(_WORDING)
            outcome.dead = {each: str(procs[each]) for each in rows.absent if each in procs and procs[each].dead}
            outcome.check(what, version)
            writer.check()

        rows.until(deadline, look, nap)
        outcome = Outcome(_WORDING)
        outcome.add_late({worker: procs.get(worker) for worker in rows.absent})
        outcome.check(what, version)
