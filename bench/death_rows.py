"""How long after the SIGKILL of one of four workers does send() raise? While it waits for the worker, and before."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contest
import models
import torch
from measure import percentiles, rounds
from scheme_sessions import receive

from shmsync.errors import WorkerDied
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

SIZE, WORKERS, LIMIT_MS = "1M parameters, 6 tensors", 4, 100.0


class Crew:
    """A sender and its workers; those that were killed are replaced."""

    def __init__(self, scheme: Any) -> None:
        self.scheme, self.module = scheme, models.build(SIZE)
        self.workers: list[contest.Workers] = []
        self.pipes: list[Any] = []
        for index in range(WORKERS):
            self._hire(index)
        processes = [each.processes[0] for each in self.workers]
        scheme.init_on_sender("policy", model=self.module, pipes=self.pipes, procs=processes)
        self.sender = scheme.get_sender()
        self.sender.send()

    def _hire(self, index: int) -> None:
        ours, theirs = contest.CONTEXT.Pipe()
        self.workers[index:] = [
            contest.Workers(SIZE, receive, [(self.scheme, theirs, index)]),
            *self.workers[index + 1 :],
        ]
        self.pipes[index:] = [ours, *self.pipes[index + 1 :]]

    def replace(self, index: int) -> None:
        self.workers[index].kill()
        self._hire(index)
        self.sender.register_worker(index, self.pipes[index], self.workers[index].processes[0])
        self.sender.send()

    def check(self) -> None:
        expected = models.digest(models.tensors(self.module))
        assert all(each.digests() == [expected] for each in self.workers), "checksum"

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
        for other, each in enumerate(self.workers):
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
        for each in self.workers:
            each.kill()
        self.scheme.shutdown()


def _stop(pid: int) -> None:
    """All threads of it: the one that gets the signal tells the others."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        path.read_text().rpartition(")")[2].split()[0] != "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.001)


def death_rows(kills: int) -> Iterator[dict[str, Any]]:
    """Each row as soon as it is known."""
    torch.set_num_threads(1)
    print(f"\nSIGKILL of one of {WORKERS} workers, until send() raises WorkerDied: p50 and p99")
    for make in (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme):
        crew = Crew(make(timeout=30))
        try:
            for when, delay in (("while send() waits for it", 0.03), ("just before send()", 0.0)):
                samples, floor = [], []
                for number in rounds(kills, fewest=1):
                    index = number % WORKERS
                    samples.append(crew.kill(index, delay))
                    crew.replace(index)
                    floor.append(crew.kill_beside(index))
                    crew.replace(index)
                crew.check()
                p50, p99 = (seconds * 1e3 for seconds in percentiles(samples))
                f50, f99 = (seconds * 1e3 for seconds in percentiles(floor))
                row = {"row": f"{make.__name__}, {when}", "p50_ms": p50, "p99_ms": p99, "limit_ms": LIMIT_MS}
                row |= {"floor_p50_ms": f50, "floor_p99_ms": f99, "met": p99 <= LIMIT_MS}
                verdict = "met" if p99 <= LIMIT_MS else "MISSED"
                print(
                    f"  {row['row']:58} {p50:8.2f} {p99:8.2f} ms   at most {LIMIT_MS:g} ms: {verdict}   "
                    f"(the kernel needs {f50:.2f} {f99:.2f})",
                    flush=True,
                )
                yield row
        finally:
            crew.close()
