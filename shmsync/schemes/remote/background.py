"""A thread for requests that have no time-out which can be relied on; who asks waits as long as it likes.

A request to a store of torch.distributed, or to the head of Ray, whose host is stopped or cut off does not come back,
and a process group gives up its connections when a wait of it times out. The threads of an executor are joined at exit
and would wait for such a request, so this thread is a daemon.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

GRACE = 0.25  # seconds that a task has to come back by itself, beyond its deadline


class Task(Future[Any]):
    """Something that the thread does.

    A Future's own lock may stay taken after an interrupt, and then the thread could not finish it. So nobody touches
    that lock before the task is done: done() reads a flag, and done_by() waits at a queue.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self._came_back = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """On the thread."""
        try:
            self.set_result(self._function())
        except BaseException as error:
            self.set_exception(error)
        self._came_back = True
        self._bell.put(None)

    @override
    def done(self) -> bool:
        return self._came_back

    def done_by(self, deadline: float) -> bool:
        """Wait for it; is it done?"""
        if not self._came_back:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
                self._bell.put(None)  # for another thread that waits
        return self._came_back


class Clerk:
    """The thread; it starts with the first task, and ends with this object or with close()."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def give(self, function: Callable[[], Any]) -> Task:
        """Let it do this after what it was given before."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._tasks,), daemon=True, name="shmsync clerk")
            thread.start()
            self._finalizer = weakref.finalize(self, _end, self._tasks, thread)
        task = Task(function)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the thread; if it is kept by what it does now, when it comes back. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._tasks = self._finalizer = None


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # and what it refers to, before the next one comes


def _end(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(GRACE)
