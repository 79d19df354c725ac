"""From the SIGKILL of one of four workers to WorkerDied out of send(), beside what the kernel needs.

The worker dies while send() waits for it, or just before send().
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import models
from common.clock import Clock
from common.measure import rounds, row
from common.row import Row

from sends import contest
from sends.shmsync_sessions import receive
from shmsync.errors import WorkerDied
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

SIZE, WORKERS = "1M parameters, 6 tensors", 4
WAYS = (("while send() waits for it", 0.03), ("just before send()", 0.0))


class Crew:
    """A sender and its workers; those that were killed are replaced."""

    def __init__(self, scheme: Any) -> None:
        self.scheme, self.module = scheme, models.build(SIZE)
        self.workers: dict[int, contest.Workers] = {}
        self.pipes: dict[int, Any] = {}
        for index in range(WORKERS):
            self._hire(index)
        processes = [each.processes[0] for each in self.workers.values()]
        scheme.init_on_sender("policy", model=self.module, pipes=list(self.pipes.values()), procs=processes)
        self.sender = scheme.get_sender()
        self.sender.send()

    def _hire(self, index: int) -> None:
        self.pipes[index], theirs = contest.CONTEXT.Pipe()
        self.workers[index] = contest.Workers(SIZE, receive, [(self.scheme, theirs, index)])

    def replace(self, index: int) -> None:
        self.workers[index].kill()
        self._hire(index)
        self.sender.register_worker(index, self.pipes[index], self.workers[index].processes[0])
        self.sender.send()

    def check(self) -> None:
        expected = models.digest(models.tensors(self.module))
        assert all(each.digests() == [expected] for each in self.workers.values()), "checksum"

    def kill(self, index: int, delay: float) -> float:
        """From the kill to WorkerDied out of send(). `delay`: how long send() has waited for the worker by then."""
        pid = self.workers[index].processes[0].pid
        killed: list[float] = []

        def strike() -> None:
            time.sleep(delay)
            killed.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

        models.step(self.module)
        if delay:
            _stop(pid)  # so that send() waits for it
            thread = threading.Thread(target=strike)
            thread.start()
        else:
            strike()
        missing = None
        try:
            self.sender.send()
        except WorkerDied as error:
            raised, missing = time.perf_counter(), error.missing
        assert missing == [index], "send() named another worker, or none"
        if delay:
            thread.join()
        for other, each in self.workers.items():
            if other != index:
                assert each.digests() == [models.digest(models.tensors(self.module))], "the others lack the version"
        return raised - killed[0]

    def kill_beside(self, index: int) -> float:
        """The floor: from the kill until the kernel says that the process is gone."""
        process = self.workers[index].processes[0]
        descriptor = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            start = time.perf_counter()
            process.kill()
            poll.poll()
            return time.perf_counter() - start
        finally:
            os.close(descriptor)

    def close(self) -> None:
        for each in self.workers.values():
            each.kill()
        self.scheme.shutdown()


def _stop(pid: int) -> None:
    """All threads of it: the one that gets the signal tells the others."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        path.read_text().rpartition(")")[2].split()[0] != "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.001)


def rows(clock: Clock, kills: int = 20) -> Iterator[Row]:
    torch.set_num_threads(1)
    schemes = (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme)
    to_come = len(schemes) * len(WAYS)
    for make in schemes:
        crew = Crew(make(timeout=30))
        try:
            for when, delay in WAYS:
                if clock.left <= 0 and (make, when) != (schemes[0], WAYS[0][0]):
                    yield clock.left_out(f"{make.__name__}, {when}")
                    continue
                clock.row(to_come)
                to_come -= 1
                samples, floor = [], []
                for number in rounds(kills, fewest=1):
                    index = number % WORKERS
                    samples.append(crew.kill(index, delay))
                    crew.replace(index)
                    floor.append(crew.kill_beside(index))
                    crew.replace(index)
                crew.check()
                # Who was named, and what the others have, is asserted after each kill.
                yield row(f"{make.__name__}, {when} / the process is gone", samples, floor, "p99 100 ms")
        finally:
            crew.close()
