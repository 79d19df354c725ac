"""Which worker has to fill which buffer, and which buffers are filled.

INV: every step may be interrupted by a signal handler that raises, and done again. A job counts from one store into
`open` on; a worker that gets it twice does it once, since serials only grow; a batch that is announced twice counts
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..worker.collector_process import COLLECT
from .worker_pool import WorkerPool, WorkerProcess


@dataclass
class Job:
    """To fill one buffer."""

    serial: int  # of all jobs of a collector
    version: int  # the newest one when it was given
    arrived: int = 0  # when it was filled, counted; 0: not yet


class Jobs:
    """The jobs of a collector's workers. `open[worker][buffer]` is the last one of each buffer."""

    def __init__(self, pool: WorkerPool, workers: int) -> None:
        self._pool = pool
        self.open: dict[int, dict[int, Job]] = {index: {} for index in range(workers)}
        self.serial = 0  # of the newest job
        self._arrivals = 0
        pool.on_batch = self._arrived

    def give(self, index: int, buffer: int, version: int) -> None:
        """Let the worker fill this buffer, whatever its job there was before."""
        self.serial += 1
        self.open[index][buffer] = Job(self.serial, version)
        self.send(index)

    def send(self, index: int) -> None:
        """Send the worker the jobs that it has not received yet."""
        member = self._pool.members[index]
        waiting = [(job.serial, buffer) for buffer, job in self.open[index].items() if not job.arrived]
        for serial, buffer in sorted(waiting):
            if serial > member.newest_job:
                member.send(COLLECT, (buffer, serial))
                member.newest_job = serial

    def filled(self, buffer: int) -> bool:
        """Have all workers done their last job of this buffer?"""
        return all(buffer in jobs and jobs[buffer].arrived > 0 for jobs in self.open.values())

    def ready(self) -> list[tuple[int, int]]:
        """(worker, buffer) of each filled buffer, in the order of arrival."""
        found = [
            (o.arrived, index, buffer) for index, each in self.open.items() for buffer, o in each.items() if o.arrived
        ]
        return [(index, buffer) for _, index, buffer in sorted(found)]

    def _arrived(self, member: WorkerProcess, content: Any) -> None:
        buffer, serial = content
        member.delivered = True
        job = self.open[member.index].get(buffer)
        if job is not None and job.serial == serial and not job.arrived:
            self._arrivals += 1
            job.arrived = self._arrivals
