"""The worker's end of a pipe: which messages are there, for which of its models."""

from __future__ import annotations

import multiprocessing
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ... import _native
from ...engine.outcome import Failure
from ...engine.pickling import dumps, small
from ...engine.timing import slice_until
from ...errors import WriterDied
from ...memory import process
from . import messages
from .connection import Channel
from .messages import Tag


class Message(NamedTuple):
    """One of ours."""

    kind: str
    model_id: str  # of PREPARE and RESUME: ""
    content: Any  # weights, a version, a handle; model ids and a number
    tag: Tag | None  # None: from a sender that tags nothing
    worker: int | None = None  # of REGISTER: the index that the sender has given this worker

    @classmethod
    def of(cls, message: Any) -> Message:
        """Of what was read from the pipe."""
        (model_id, content), kind = message
        if kind in (messages.PREPARE, messages.RESUME):
            return cls(kind, "", (frozenset(model_id), content), Tag(kind, content[0]))
        if kind == messages.REGISTER:
            worker = message.who if isinstance(message, messages.Tagged) else None
            return cls(kind, model_id, content, Tag(model_id, 0), worker)
        tag = message.tag if isinstance(message, messages.Tagged) else None
        if tag is None and isinstance(content, int):
            tag = Tag(model_id, content)
        return cls(kind, model_id, content, tag)


class Inbox:
    """Shared by the receivers of all models that use the pipe."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.receivers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.unanswered: Message | None = None  # handed out by receive_weights(); send_ack() answers it
        self.lock = threading.RLock()  # receivers in several threads may share a pipe
        self._messages: deque[Message] = deque()
        self._looked = 0.0  # when the sender's process was last looked for

    @classmethod
    def of(cls, channel: Channel) -> Inbox:
        """The inbox of a channel; the same object each time."""
        if not isinstance(channel.role, cls):
            if channel.role is not None:
                raise ValueError("this end of the pipe is a sender's; a receiver needs the other end")
            channel.role = cls(channel)
        return channel.role

    def next(self, wanted: Callable[[Message], bool], deadline: float) -> Message | None:
        """The oldest message that is wanted; None when the monotonic time `deadline` comes first.

        Raises WriterDied when the sender is gone and nothing wanted is left.
        """
        if self.channel.unsent:
            self.channel.flush()  # an answer that the pipe had no room for
        while True:
            with self.lock:
                for position, message in enumerate(self._messages):
                    if wanted(message):
                        del self._messages[position]
                        return message
                if self._read():
                    continue
            if self.channel.ended:
                raise WriterDied(
                    "the sender closed its end of the pipe or died, so no weights will come; leave the loop"
                )
            if time.monotonic() >= deadline:
                self._look_for_sender()
                return None
            self.channel.wait(deadline)

    def quick(self, deadline: float) -> Message | None:
        """The next message if it is small, and nothing else is there to be looked at first."""
        channel = self.channel
        if self._messages or not channel.idle or channel.closed:
            return None
        if not _native.wait_readable(channel.fd, slice_until(deadline)):
            return None
        with self.lock:
            payload = None if self._messages else channel.take_small()
            found = None if payload is None else channel.loads(payload)
        return None if found is None else self._ours(found[0])

    def put_back(self, message: Message) -> None:
        """Give back what next() or quick() gave."""
        with self.lock:
            self._messages.appendleft(message)

    def _read(self) -> bool:
        """Take in one message, if one is there."""
        try:
            found = self.channel.read()
        except EOFError:
            return False
        if found is None:
            return False
        if (message := self._ours(found[0])) is not None:
            self._messages.append(message)
        return True

    def _ours(self, message: Any) -> Message | None:
        """A message about weights; any other is kept for the worker's own loop."""
        if messages.is_message(message):
            return Message.of(message)
        self.channel.pending.append(message)
        return None

    def _look_for_sender(self) -> None:
        # With fork the siblings hold the sender's end too, so that its death does not end the pipe.
        now = time.monotonic()
        if now - self._looked < 0.05:
            return
        self._looked = now
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise WriterDied(f"the sender (pid {parent.pid}) died, so no weights will come; leave the loop")

    def answer(self, message: Message, word: str) -> None:
        """Say that it was applied, registered, or is awaited."""
        tag = message.tag
        if tag is None:
            payload = small((None, word))
        elif message.kind == messages.UPDATE and isinstance(message.content, int):
            payload = small((tuple(tag), word))
        else:
            payload = small(messages.Tagged((None, word), tag, process.me().owner))
        self.channel.send_small(payload)

    def answer_failure(self, message: Message, error: BaseException) -> None:
        """Send an exception that was just caught to the sender."""
        self.channel.queue(dumps((Failure.of(error, message.tag), messages.FAILED)))
