"""Door: where senders connect to a worker. DoorKeeper: the worker's thread that accepts them and sends to them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from typing_extensions import override

from ...memory.process import poll
from .connection import Channel
from .proved import Listener, connection_of
from .serial_executor import SerialExecutor, Task
from .timed_queue import TimedQueue

_KEPT = 1000  # messages, until a sender comes
_SLICE = 0.25  # seconds of a wait without a task


class Door:
    """Where senders connect, and the connections to them. It is tended on the thread of a DoorKeeper alone."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._listener = Listener(host, secret)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self.port = self._listener.port
        self.senders: dict[Connection, Channel] = {}
        self._first: deque[bytes] = deque(maxlen=_KEPT)  # messages for the first sender that comes
        self._lock = threading.RLock()

    def tend(self, seconds: float, *, read: bool) -> list[Channel]:
        """Let senders in, for so long at most; those that have sent something. `read`: return for these too."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        strangers = self._listener.register(poller)
        for channel in self.senders.values():
            events = (select.POLLIN if read else 0) | (select.POLLOUT if channel.unsent else 0)
            if events:
                poller.register(channel.fd, events)
        found = {fd for fd, _ in poll(poller, min(seconds, 1.0 if strangers else seconds) * 1000)}
        if self._bell in found:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        for connection in map(connection_of, self._listener.admit(found)):
            with self._lock:
                self.senders[connection] = channel = Channel.of(connection)
                while self._first:
                    channel.send(self._first.popleft())
        for channel in self.senders.values():
            with contextlib.suppress(OSError):  # a fork has closed it
                channel.flush()
        return [channel for channel in self.senders.values() if read and channel.fd in found]

    def drop(self, channel: Channel) -> None:
        """This sender has ended the connection."""
        for connection in [each for each, of in self.senders.items() if of is channel]:
            with self._lock, channel.lock:  # no other thread is writing: the descriptor's number is used again
                del self.senders[connection]
                connection.close()

    def send(self, payload: bytes) -> None:
        """On any thread: a message for every sender that is there, else for the first that comes."""
        with self._lock:
            there = [channel for channel in self.senders.values() if not _hung_up(channel)]
            for channel in there:
                channel.send(payload)
            if not there:
                self._first.append(payload)

    def ring(self) -> None:
        """On any thread: let tend() return."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for connection in self.senders:
            connection.close()
        with self._lock:
            self._closed = True
            os.close(self._bell)


def _hung_up(channel: Channel) -> bool:
    poller = select.poll()
    poller.register(channel.fd, select.POLLRDHUP)
    return channel.closed or bool(poll(poller, 0))


class DoorKeeper(SerialExecutor):
    """The worker's thread: it does tasks, and lets senders in meanwhile, once it was handed a Door."""

    door: Door | None = None

    @override
    def put(self, item: Any) -> None:
        super().put(item)
        if self.door is not None:
            self.door.ring()

    @staticmethod
    @override
    def work(items: TimedQueue[Any]) -> None:
        door: Door | None = None
        try:
            while True:
                if door is not None:
                    while items.empty():
                        door.tend(_SLICE, read=False)
                item = items.get()
                if item is None:
                    return
                if isinstance(item, Task):
                    item.run()
                else:
                    door = item
                del item
        finally:
            if door is not None:
                door.close()

    @override
    def close(self) -> None:
        if self.door is not None:
            self.put(None)  # and ring
        super().close()
