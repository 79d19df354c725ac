"""The sender's end of a pipe: which messages have been sent, and what the worker answered.

INV: an answer is for exactly one message. It names it by its tag; an untagged one is for the oldest of its kind. An
answer to a message that no send waits for is dropped, so it never counts for a later one. All else that comes is a
message of the worker's program.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from ... import _native
from ...engine.deadlines import slice_until
from ...engine.outcome import Failure
from ...memory.process import Peer
from . import messages
from .connection import Channel
from .messages import Tag
from .send_lock import SendLock

_AT_ONCE = 256  # user messages of a worker that are read between two looks at the deadline
_MOMENT = 2_000_000  # ns; so long other threads that share a pipe may wait for it
Result = Failure | str | None  # what went wrong; None: applied. A string: it answered something else


class SenderEnd:
    """Shared by the senders of all models that use the pipe."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.peer: Peer | None = None
        self.lock = threading.RLock()  # held by the reading thread; senders of several models, and so threads, share it
        self._awaited: dict[Tag, bool] = {}  # in the order in which they were sent; False: no send waits any more
        self._results: dict[Tag, Result] = {}
        self.highest: dict[str, int] = {}  # by model: the newest version that any sender sent over this pipe
        self.reaches = False  # has the worker shown that it can open what this process has?
        self._in_arenas: dict[str, int] = {}  # the newest version of a model that is answered by (model, version)
        self._reasons: dict[Tag, str] = {}  # why there will be no answer, in the worker's words
        self._send_locks: dict[str, SendLock] = {}
        self.announcers: dict[str, object] = {}  # by model: the sign of the carrier that has announced weights last

    @classmethod
    def of(cls, channel: Channel) -> SenderEnd:
        """That of a channel; the same object each time."""
        if not isinstance(channel.role, cls):
            if channel.role is not None:
                raise ValueError("this end of the pipe is a worker's; a sender needs the other end")
            channel.role = cls(channel)
        return channel.role

    def send_locks(self, model_id: str) -> SendLock:
        """The lock for sends of this model over this pipe; see PipeSender.send_locks()."""
        return self._send_locks.get(model_id) or self._send_locks.setdefault(model_id, SendLock())

    def send(self, payload: bytes, tag: Tag, *, replaceable: bool = False) -> None:
        """Send a message that will be answered with this tag. `replaceable`: newer weights may take its place."""
        with self.lock:
            if not self.channel.closed:
                self.pump()  # what has come before cannot be an answer to it
            self.note(tag)
            if self.channel.closed:
                self._awaited[tag] = True  # the wait will find it dead
            else:
                self.channel.frames.send(payload, tag.model_id if replaceable else "", tag, self._awaited)

    def note(self, tag: Tag) -> None:
        """A message of this tag is about to be sent: its number is never used again."""
        self.highest[tag.model_id] = max(tag.version, self.highest.get(tag.model_id, 0))

    def answered_by_version(self, tag: Tag) -> None:
        """The message of this tag says where its weights lie, so its answer is the pair ((model, version), word)."""
        self._in_arenas[tag.model_id] = max(tag.version, self._in_arenas.get(tag.model_id, 0))

    @property
    def idle(self) -> bool:
        """Is every message answered, and no message half written or half read?"""
        channel = self.channel
        return not (self._awaited or self._results) and channel.idle and not channel.closed

    def forget(self, tag: Tag) -> None:
        """Stop waiting for an answer; it is dropped when it comes."""
        with self.lock:
            self._results.pop(tag, None)
            if self._reasons.pop(tag, None) is not None:
                self._awaited.pop(tag, None)  # the worker cannot answer it any more
            elif tag in self._awaited:
                self._awaited[tag] = False

    def all_answered(self, model_id: str) -> bool:
        """Is every message of this model answered?"""
        with self.lock:
            if not self.channel.closed:
                self.pump()
            return all(tag.model_id != model_id for tag in self._awaited)

    def expects(self, tag: Tag) -> bool:
        """Has a message of this tag an answer, or will it have one?"""
        return tag in self._awaited or tag in self._results

    def answered(self, tag: Tag) -> bool:
        """Is the answer there? take() gives it.

        Where newer weights have taken the place of a message before it left, the answers to those must be there.
        """
        if tag in self._results:
            return True
        with self.lock:
            return not self.expects(tag) and all(other.model_id != tag.model_id for other in self._awaited)

    def take(self, tag: Tag) -> Result:
        """The answer, once."""
        return self._results.pop(tag, None)

    def reasons(self, tags: Iterable[Tag]) -> set[str]:
        """The worker's reasons not to answer these messages."""
        return {self._reasons[tag] for tag in tags if tag in self._reasons}

    def oldest(self) -> Tag | None:
        """Of the messages whose answers are awaited."""
        with self.lock:
            return next((tag for tag, wanted in self._awaited.items() if wanted), None)

    def pump(self) -> None:
        """Write what can be written, read what is there."""
        channel = self.channel
        with self.lock:
            channel.flush()
            try:
                for _ in range(_AT_ONCE):
                    if (found := channel.peek()) is None:
                        break
                    self._sort(found[0])
            except EOFError:
                pass  # channel.ended records it

    def _sort(self, message: Any) -> None:
        channel, awaited = self.channel, self._awaited
        data: Any
        data, word = message if messages.is_answer(message) else (None, "")
        tag: Tag | None = None
        result: Result = None
        reason: str | None = None
        reaches = self.reaches
        own = not word  # a message of the worker's own
        if isinstance(message, messages.Tagged) and word:
            tag, reaches = message.tag or self._oldest_of(word), reaches or message.reaches
            if message.who:
                self._introduce(message.who)
            if word == messages.UNKNOWN:
                known = ", ".join(map(repr, data[1])) or "no model"
                reason = f"it has no receiver for {data[0]!r}, only for {known}"
            elif word not in messages.ANSWERS:
                own, result = True, unexpected(word)  # its own, and the answer to this message
        elif word == messages.FAILED:
            tag, result = data.tag or self._oldest_of(word), data
        elif data is not None and word == messages.UPDATED and self._names_version(data):
            tag = Tag(*data)
        elif data is None and word:
            tag = self._oldest_of(word)
        else:
            own = True
        wanted = tag is not None and awaited.get(tag, False)
        # No call from here on: see Channel.peek().
        self.reaches = reaches
        if own:
            channel.pending += (message,)
        if tag is not None and tag in awaited:
            if reason is not None and wanted:
                self._reasons[tag] = reason
            else:
                del awaited[tag]
                if wanted:
                    self._results[tag] = result
        del channel.arrived[0]

    def _names_version(self, data: Any) -> bool:
        """Is it what names a version that was sent from here and lies in an arena?"""
        return bool(data[1] <= self._in_arenas.get(data[0], 0))

    def forget_habits(self) -> None:
        """Another process may answer from now on, and in another way."""
        self.reaches = False

    def _introduce(self, owner: int) -> None:
        """The worker has named its process."""
        if self.peer is None:
            self.peer = Peer(owner=owner)
        else:
            self.peer.introduce(owner)

    def _oldest_of(self, word: str) -> Tag | None:
        registration = {messages.REGISTERED: True, messages.UPDATED: False}.get(word)
        for tag, wanted in self._awaited.items():
            if (registration is None and wanted) or registration == (tag.version == 0):
                return tag
        return None


def unexpected(word: str) -> str:
    """What is wrong with an answer that is none of ours."""
    return f"it answered {word!r}"


class Link:
    """A worker as a sender knows it.

    Args:
        pipe: the sender's end of a duplex multiprocessing.Pipe.
        process: the worker's Process, or a function that gives it (or None) once it is there.
    """

    def __init__(self, pipe: Any, process: Any = None) -> None:
        self.pipe = pipe
        self.channel = Channel.of(pipe)
        self.end = SenderEnd.of(self.channel)
        self.reported = False  # WorkerDied has named it
        self._process = process
        if process is not None:
            self.end.peer = None  # perhaps a new process at an old pipe
            self.end.forget_habits()

    @property
    def peer(self) -> Peer | None:
        """The process at the other end, once it is known."""
        end = self.end
        if end.peer is None and self._process is not None:
            process = self._process() if callable(self._process) else self._process
            if process is not None and process.pid is not None:
                end.peer = Peer(process=process)
        return end.peer

    @property
    def dead(self) -> bool:
        """Is its process gone, or its end of the pipe closed? What it sent before can still be read."""
        return self.channel.ended or self.channel.closed or (self.peer is not None and self.peer.dead)

    @property
    def finished(self) -> bool:
        """Did its process exit with code 0?"""
        return self.peer is not None and self.peer.finished

    def take_pending(self) -> list[Any]:
        """Messages from the worker that are no answers, oldest first; each is given once."""
        self.end.pump()
        return self.channel.take_pending()

    def __str__(self) -> str:
        if self.peer is not None:
            return str(self.peer)
        return "this end of its pipe is closed" if self.channel.closed else "its end of the pipe is closed"


class Route:
    """The quick way to these workers, prepared: one message to each, one answer from each."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self.links = dict(links)
        # Every route locks in one order.
        ordered = sorted(self.links.items(), key=lambda item: item[1].channel.fd)
        self._indices = [index for index, _ in ordered]
        self._ends = [link.end for _, link in ordered]
        self._frames = [link.channel.frames for _, link in ordered]
        self._awaited = [end._awaited for end in self._ends]
        peers = [link.peer for _, link in ordered]
        self._processes = [peer.fd for peer in peers if peer is not None and peer.fd is not None]
        self.complete = len(self._processes) == len(peers)  # else some process may become known yet

    def exchange(self, message: bytes, answer: bytes, tag: Tag, deadline: float) -> list[int]:
        """Send `message` to all, and wait a moment for `answer`. Returns the workers without one, for gather()."""
        locked = []
        try:
            for end in self._ends:
                locked.append(end.lock)  # first: an interrupt after acquire() must not leave it taken
                end.lock.acquire()
            for each in self._ends:
                if not each.idle:
                    for end in self._ends:
                        end.answered_by_version(tag)
                        end.send(message, tag, replaceable=True)
                    return self._indices
            moment = min(slice_until(deadline), _MOMENT)
            for end in self._ends:
                end.note(tag)
                end.answered_by_version(tag)
            ends, awaited = self._frames, self._awaited
            done = _native.exchange(ends, awaited, self._processes, message, tag.model_id, tag, answer, moment)
            if len(done) == len(self._indices):
                return []
            return [index for position, index in enumerate(self._indices) if position not in done]
        finally:
            try:
                for lock in locked:
                    lock.release()
            except BaseException as error:
                for lock in locked:
                    if lock._is_owned():  # type: ignore[attr-defined]
                        lock.release()
                if not isinstance(error, RuntimeError):  # the last one was not taken yet when an interrupt came
                    raise
