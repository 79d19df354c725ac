"""A thread for requests without a reliable time-out; each caller waits until its own deadline.

A request to a store of torch.distributed, or to the head of Ray, whose host is stopped or cut off does not return,
and a process group gives up its connections when a wait of it times out. The threads of an executor are joined at exit
and would wait for such a request, so this thread is a daemon.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from ... import _native
from .timed_queue import TimedQueue

_AT_EXIT = 2.0  # seconds that the exit of the process waits for requests under way
GRACE = 0.04  # seconds that a task has to return, beyond its deadline; a call has up to two of them


class Task(Future[Any]):
    """Something that the thread does.

    A Future's own lock may stay taken after an interrupt, and then the thread could not finish it. So no code touches
    that lock before the task is done: done() reads a flag, and done_by() waits at a queue.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function: Callable[[], Any] | None = function
        self._came_back = False
        self._bell: TimedQueue[None] = TimedQueue()

    def run(self) -> None:
        """On the thread."""
        function, self._function = self._function, None  # it may refer to what has this task, such as a call
        assert function is not None
        try:
            self.set_result(function())
        except BaseException as error:
            self.set_exception(error)
        del function
        self._came_back = True
        self._bell.put(None)

    @override
    def done(self) -> bool:
        return self._came_back

    def done_by(self, deadline: float) -> bool:
        """Wait for it; is it done?"""
        if not self._came_back:
            with contextlib.suppress(queue.Empty):
                self._bell.get(deadline - time.monotonic())
                self._bell.put(None)  # for another thread that waits
        return self._came_back


class SerialExecutor:
    """The thread; it starts with the first task, and ends with this object or with close(). Thread-safe."""

    def __init__(self) -> None:
        self._started: tuple[TimedQueue[Any], weakref.finalize[..., Any]] | None = None
        self._generation = -1  # a thread does not survive a fork
        self._starting = threading.Lock()  # only ever in a `with`, which no interrupt leaves without giving it back

    def give(self, function: Callable[[], Any]) -> Task:
        """Let it do this after what it was given before."""
        task = Task(function)
        self.put(task)
        return task

    def put(self, item: Any) -> None:
        """Hand something to the thread; a Task, unless a subclass knows more."""
        generation = _native.fork_generation()
        started = self._started
        if started is None or self._generation != generation:
            with self._starting:
                if self._started is None or self._generation != generation:
                    self._started, self._generation = self._start(), generation
                started = self._started
        started[0].put(item)

    def _start(self) -> tuple[TimedQueue[Any], weakref.finalize[..., Any]]:
        items: TimedQueue[Any] = TimedQueue()
        thread = threading.Thread(target=self.work, args=(items,), daemon=True, name="shmsync executor")
        finalizer = weakref.finalize(self, _end, items, thread)  # first: an interrupt may lose a thread that has begun
        # start() waits for the new thread, and an interrupt of that may keep it from ever beginning. Handlers of
        # signals run on the main thread alone, so another one starts it.
        _thread.start_new_thread(thread.start, ())
        return items, finalizer

    @staticmethod
    def work(items: TimedQueue[Any]) -> None:
        """What the thread does, until it is handed None."""
        while (task := items.get()) is not None:
            task.run()
            del task  # and what it refers to, before the next one comes

    def close(self) -> None:
        """End the thread; if a request blocks it, when that returns. Idempotent."""
        started, self._started = self._started, None
        if started is not None:
            started[1]()


def _end(items: TimedQueue[Any], thread: threading.Thread) -> None:
    items.put(None)
    if thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):  # it has not begun, and will end at once
            thread.join(GRACE)
        if thread.is_alive():
            _late.add(thread)


_late: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # were ended in the middle of a request


@atexit.register
def _wait_for_late() -> None:
    """A thread that returns from torch's own code while the interpreter goes would abort the process."""
    deadline = time.monotonic() + _AT_EXIT
    for thread in list(_late):
        thread.join(max(0.0, deadline - time.monotonic()))
