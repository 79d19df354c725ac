"""Workers of tests, as a test sees them: how they are started, how they answer, and which processes they are."""

from __future__ import annotations

import multiprocessing


def queue(method="forkserver"):
    return multiprocessing.get_context(method).SimpleQueue()


def pids(workers):
    return [process.pid for process in workers.procs]
