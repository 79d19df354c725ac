"""A thread for requests that have no time-out which can be relied on; who asks waits as long as it likes.

A request to a store of torch.distributed, or to the head of Ray, whose host is stopped or cut off does not come back,
and a process group gives up its connections when a wait of it times out.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

GRACE = 0.25  # seconds that a job has to come back by itself, beyond its deadline


class Job:
    """Something that the thread does, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the thread."""
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        """Has it come back?"""
        return self._done.is_set()

    def done_by(self, deadline: float) -> bool:
        """Wait for it."""
        return self._done.wait(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))

    def result(self) -> Any:
        """What it returned, or raised."""
        if self._error is not None:
            raise self._error
        return self._result


class Clerk:
    """The thread; it starts with the first job, and ends with this object or with close()."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def give(self, function: Callable[[], Any]) -> Job:
        """Let it do this after what it was given before."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="shmsync clerk")
            thread.start()
            self._finalizer = weakref.finalize(self, _end, self._jobs, thread)
        job = Job(function)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread; if it is kept by what it does now, when it comes back. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._jobs = self._finalizer = None


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # and what it refers to, before the next one comes


def _end(jobs: queue.SimpleQueue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(GRACE)
