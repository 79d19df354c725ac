"""Waiting until workers are attached, and noticing that one of them died before it could."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from typing import Any

from ... import _native
from ...errors import AckTimeout, WorkerDied
from ...memory.control import reader_table
from ...memory.system.process import Peer, Peers, ProcessState, owner_word
from ..deadlines import check_worker
from ..outcome import listed

Procs = Sequence[Any] | Mapping[int, Any] | None

_NAP = 2  # ms between two looks at the reader table; a death ends a nap


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
            return Peer(process=_Ended(int(process)))
    if hasattr(process, "exitcode") and hasattr(process, "pid"):
        return Peer(process=process)
    if hasattr(process, "poll") and hasattr(process, "pid"):
        return Peer(process=_Child(process))
    raise TypeError(f"a process is a multiprocessing.Process, a subprocess.Popen or a pid, not {process!r}")


class _Ended:
    """A pid that no process has any more."""

    exitcode = 0

    def __init__(self, pid: int) -> None:
        self.pid = pid


class _Child:
    """A subprocess.Popen, asked as a multiprocessing.Process is."""

    def __init__(self, popen: Any) -> None:
        self._popen = popen
        self.pid: int = popen.pid

    @property
    def exitcode(self) -> int | None:
        code = self._popen.poll()
        return None if code is None else int(code)


def wait_for_readers(
    control: _native.Control,
    workers: list[int],
    procs: dict[int, Peer],
    deadline: float,
    version: int,
    check: Callable[[], None],
) -> None:
    """Wait until live subscribers of these workers are attached. `check` raises what else should end the wait.

    Raises WorkerDied as soon as the process of one that is not attached has ended, AckTimeout at the deadline.
    """
    with ExitStack() as stack:
        peers = Peers()
        stack.callback(peers.close)
        for peer in procs.values():
            stack.callback(peer.close)
        poller = select.poll()
        while True:
            # Deaths first: a worker that attached and then died would otherwise be waited for until the deadline.
            dead = {worker: peer for worker, peer in procs.items() if peer.dead}
            rows = [row for row in reader_table.claimed(control) if row.worker in workers]
            attached = {row.worker for row in rows if peers.alive(row.owner)}
            missing = [worker for worker in workers if worker not in attached]
            lost = [worker for worker in missing if worker in dead]
            if lost:
                named = ", ".join(f"worker {worker} ({dead[worker]})" for worker in lost)
                raise WorkerDied(
                    f"{named} ended before all were attached; start it again, and look for its own error",
                    version=version,
                    missing=lost,
                )
            if not missing:
                return
            check()
            if time.monotonic() >= deadline:
                raise _late(missing, procs, peers, version)
            for worker in missing:
                fd = procs[worker].fd if worker in procs else None
                if fd is not None:
                    poller.register(fd, select.POLLIN)
            poller.poll(_NAP)


def _late(missing: list[int], procs: dict[int, Peer], peers: Peers, version: int) -> AckTimeout:
    def named(worker: int) -> str:
        peer = procs.get(worker)
        if peer is None:
            return listed([worker])
        try:
            stopped = peers.state(owner_word(peer.pid)) is ProcessState.STOPPED
        except OSError:
            stopped = False
        return f"{listed([worker])} (pid {peer.pid}{', stopped' if stopped else ''})"

    return AckTimeout(
        f"{', '.join(map(named, missing))} did not attach in time; is it still starting, or did it never make its "
        "Subscriber with worker=? Give more time with timeout=, and pass procs= to learn of deaths at once",
        version=version,
        missing=missing,
    )
