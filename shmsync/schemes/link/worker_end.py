"""The worker's end of a pipe: which messages are there, for which of its models, and the answers to them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ... import _native
from ...engine.deadlines import slice_until
from ...engine.outcome import Failure
from ...errors import ProtocolError, WriterDied
from ...memory.process import dead_parent, me
from ...memory.slab import reachable
from ..pickling import dumps, small
from . import messages
from .connection import Channel
from .messages import Message, Tag


class WorkerEnd:
    """Shared by the receivers of all models that use the pipe."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.receivers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.lock = threading.RLock()  # receivers in several threads may share a pipe
        self._messages: deque[Message] = deque()
        self._given: Message | None = None  # by take(); ack() answers it
        self._reported: set[Tag] = set()  # messages for models without a receiver here, which the sender knows
        self._reached: dict[int, bool] = {}  # by owner word of a sender
        self._looked = 0.0  # when the sender's process was last looked for

    @classmethod
    def of(cls, channel: Channel) -> WorkerEnd:
        """That of a channel; the same object each time."""
        if not isinstance(channel.role, cls):
            if channel.role is not None:
                raise ValueError("this end of the pipe is a sender's; a receiver needs the other end")
            channel.role = cls(channel)
        return channel.role

    def next(self, wanted: Callable[[Message], bool], deadline: float) -> Message | None:
        """The oldest message that is wanted; None when the monotonic time `deadline` comes first.

        Raises WriterDied when the sender is gone and nothing wanted is left.
        """
        self.channel.flush()  # an answer that the pipe had no room for
        while True:
            with self.lock:
                for position, message in enumerate(self._messages):
                    if wanted(message):
                        del self._messages[position]
                        return message
                if self._read():
                    continue
                self._report_unknown()
            if self.channel.garbage:
                raise ProtocolError(
                    f"what came from the sender is no message: {self.channel.garbage}. Nothing that follows can be "
                    "read, so this pipe is lost; make a new receiver with a new pipe"
                )
            if self.channel.ended:
                raise WriterDied(
                    "the sender closed its end of the pipe or died, so no weights will come; leave the loop"
                )
            if time.monotonic() >= deadline:
                self._look_for_sender()
                return None
            self.channel.wait(deadline)

    def quick(self, deadline: float) -> Message | None:
        """The next message, if it is all there and nothing else has to be looked at first."""
        channel = self.channel
        if self._messages or not channel.idle or channel.closed:
            return None
        if not _native.wait_readable(channel.fd, slice_until(deadline)):
            return None
        with self.lock:
            return self._messages.pop() if not self._messages and self._read() and self._messages else None

    def put_back(self, message: Message) -> None:
        """Give back what next() or quick() gave."""
        with self.lock:
            self._messages.appendleft(message)

    def _read(self) -> bool:
        """Take in one message, if one is there. What is not about weights is kept for the worker's own loop."""
        try:
            found = self.channel.peek()
        except EOFError:
            return False
        if found is None:
            return False
        ours, channel = messages.is_message(found[0]), self.channel
        message = Message.of(found[0]) if ours else None
        # No call from here on: see Channel.peek().
        if message is not None:
            self._messages += (message,)
        else:
            channel.pending += found
        del channel.arrived[0]
        return True

    def _report_unknown(self) -> None:
        """Report messages without a receiver here to the sender, once each: its error names them if none comes in time.

        A receiver may be made later, so the message is kept; of weights the newest.
        """
        for message in list(self._messages):
            if message.kind != messages.UPDATE or message.tag is None:
                continue
            if message.tag not in self._reported and message.model_id not in self.receivers:
                content = (message.model_id, tuple(sorted(self.receivers)))
                self.channel.send(small(messages.Tagged((content, messages.UNKNOWN), message.tag, me().owner)))
                self._reported.add(message.tag)
                older = [m for m in self._messages if (m.kind, m.model_id) == (messages.UPDATE, message.model_id)][:-1]
                for each in older:
                    self._messages.remove(each)
        if self._reported:
            self._reported &= {message.tag for message in self._messages if message.tag is not None}

    def _look_for_sender(self) -> None:
        # With fork the siblings hold the sender's end too, so that its death does not end the pipe.
        now = time.monotonic()
        if now - self._looked < 0.05:
            return
        self._looked = now
        sender = dead_parent()
        if sender is not None:
            raise WriterDied(f"the sender (pid {sender}) died, so no weights will come; leave the loop")

    def answer(self, message: Message, word: str) -> None:
        """Say that it was applied or registered."""
        tag = message.tag
        if tag is None:
            payload = small((None, word))
        elif message.kind == messages.UPDATE and isinstance(message.content, int):
            payload = small((tuple(tag), word))
        else:
            payload = small(messages.Tagged((None, word), tag, me().owner, self._reaches(message.sender)))
        self.channel.send(payload)

    def _reaches(self, sender: int) -> bool:
        """Can weights be read from the sender's own memory? Asked once for each sender."""
        if sender and sender not in self._reached:
            self._reached[sender] = reachable(sender)
        return self._reached.get(sender, False)

    def answer_failure(self, message: Message, error: BaseException) -> None:
        """Send an exception that was just caught to the sender."""
        self.channel.send(dumps((Failure.of(error, message.tag), messages.FAILED)))

    # For a loop of the worker's own, without a receiver.

    def take(self, kinds: tuple[str, ...], deadline: float) -> Message | None:
        """The next message of these kinds; ack() answers it."""
        message = self.next(lambda message: message.kind in kinds, deadline)
        if message is not None:
            self._given = message
        return message

    def ack(self, word: str) -> None:
        """Answer what take() gave, or what the worker itself has read from the pipe."""
        answered, self._given = self._given, None
        if answered is None:  # for the oldest message without an answer, and no other word
            self.channel.send(small(messages.Tagged((None, word), None, me().owner)))
        else:
            self.answer(answered, word)

    def fail(self, message: Message, error: BaseException) -> None:
        """Say that it could not be applied, in place of answer() or ack()."""
        given, self._given = self._given, None
        self.answer_failure(message if message.tag is not None else given or message, error)
