"""One thread in each worker process, whatever the number of models, which wakes when a trainer sends a message."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable

from .... import _native


class ConnectionListener:
    """The listening thread of one process; it ends with the last connection."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: garbage collection may call remove() while it is held
        self._listening: dict[int, weakref.WeakMethod[Callable[[], bool]]] = {}  # by descriptor
        self._thread: threading.Thread | None = None
        self._bell = -1  # an eventfd: the connections have changed

    @classmethod
    def here(cls) -> ConnectionListener:
        """The listener of the calling process."""
        # A thread does not survive a fork. setdefault: two threads may ask at once, and a fork may come in between.
        return _listeners.setdefault(_native.fork_generation(), cls())

    def add(self, fd: int, on_message: Callable[[], bool]) -> None:
        """Call this method whenever the connection has messages. It returns False when the trainer is gone.

        Its object is held weakly.
        """
        with self._lock:
            self._listening[fd] = weakref.WeakMethod(on_message)
            if self._thread is None:
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._run, daemon=True, name="shmsync")
                self._thread.start()
            else:
                os.eventfd_write(self._bell, 1)

    def remove(self, fd: int) -> None:
        """Forget a connection before it is closed. With the last one, waits for the end of the thread. Idempotent."""
        with self._lock:
            thread = self._thread
            if self._listening.pop(fd, None) is None or thread is None:
                return
            os.eventfd_write(self._bell, 1)
            last = not self._listening
        if last and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while True:
            poll = select.poll()
            with self._lock:
                if not self._listening:
                    os.close(self._bell)
                    self._bell, self._thread = -1, None
                    return
                bell = self._bell
                for fd in (bell, *self._listening):
                    poll.register(fd, select.POLLIN)
            self._serve(poll, bell)

    def _serve(self, poll: select.poll, bell: int) -> None:
        """Serve the connections until one is added or removed."""
        while True:
            for fd, _ in poll.poll():
                if fd == bell:
                    os.eventfd_read(bell)
                    return
                with self._lock:
                    reference = self._listening.get(fd)
                on_message = None if reference is None else reference()
                if on_message is None or not on_message():
                    with self._lock:
                        if self._listening.get(fd) is reference:
                            self._listening.pop(fd, None)
                    return
                del on_message


_listeners: dict[int, ConnectionListener] = {}  # by fork generation
