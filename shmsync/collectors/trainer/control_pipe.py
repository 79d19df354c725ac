"""The trainer's end of a worker's control pipe: it never blocks, and an interrupt loses no message.

Bytes move in native code, where no signal handler runs (_native.Frames). A message is given again until it is dropped,
so its reader may be interrupted, and read it again: that must change nothing.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

from ... import _native


class ControlPipe:
    """Messages (word, content) to one worker, and from it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._frames = _native.Frames(connection.fileno())
        self._arrived: list[bytes] = []

    def send(self, word: str, content: Any = None) -> None:
        """Send a message, as far as it goes; flush() sends the rest. One to a dead worker is dropped."""
        self._frames.send(pickle.dumps((word, content)))

    def flush(self) -> bool:
        """Write what the pipe takes now. Is something left?"""
        if self._frames.unsent:
            self._frames.flush()
        return self._frames.unsent

    def peek(self) -> tuple[str, Any] | None:
        """The oldest message that was not dropped; None if there is no whole one."""
        if not self._arrived and not self._frames.read_into(self._arrived):
            return None
        message: tuple[str, Any] = pickle.loads(self._arrived[0])
        return message

    def drop(self) -> None:
        """Forget what peek() gave."""
        del self._arrived[0]

    @property
    def ended(self) -> bool:
        """Has the worker closed its end, and was everything read?"""
        return self._frames.ended and not self._arrived

    def poll(self) -> bool:
        """Is there something to read, or has the worker closed its end?"""
        return bool(self._arrived) or self.connection.poll()
