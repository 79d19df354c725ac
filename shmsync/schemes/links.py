"""One exchange over pipes: messages are posted without waiting, and one wait gathers the answers.

Link: the trainer's end of the pipe to one worker, with that worker's process. gather(): the only wait for answers.
Inbox: the worker's end. Pipes themselves are in pipe.py.

INV: an answer is for exactly one message. It names it by its tag; an untagged one is for the oldest of its kind. An
answer to a message that no send waits for is dropped, so it never counts for a later one.
"""

from __future__ import annotations

import select
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..engine.outcome import Failure, Outcome, Wording, listed
from ..errors import WriterDied
from ..memory.process import Peer, dead_parent, poll
from ..memory.segment import Handle
from . import messages
from .messages import Message, Tag
from .pipe import Pipe, milliseconds

WORDING = Wording("a worker applies at its next receive()")


Result = Failure | str | None  # what went wrong; None: applied. A string: it answered something else


class Link:
    """A worker as senders know it: a pipe, a process, and the messages that it has not answered.

    Made once for a pipe, by of(): the senders of several models share it.

    Attributes:
        unanswered: the tags of messages in the order in which they were sent; False: no send waits any more.
        results: the answers that a send has still to take.
        highest: by model: the newest version that any sender sent over this pipe.
        registered: by model: the arena that the worker was told of last.
        reported: WorkerDied has named it, so that sends leave it out.
        owner: the owner word of its process, once an answer has named it.
        answered: it has answered a message at some time.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.unanswered: dict[Tag, bool] = {}
        self.results: dict[Tag, Result] = {}
        self.highest: dict[str, int] = {}
        self.registered: dict[str, Any] = {}
        self.reported = False
        self.answered = False
        self.owner = 0
        self._peer: Peer | None = None
        self._process: Any = None

    @classmethod
    def of(cls, connection: Any, process: Any = None) -> Link:
        """The link over this end of a pipe.

        `process`: the worker's Process, or a function that gives it (or None) once it is there. It may be a new one at
        an old pipe.
        """
        pipe = Pipe.of(connection)
        if pipe.end is None:
            pipe.end = cls(pipe)
        if not isinstance(pipe.end, cls):
            raise ValueError("this end of the pipe is a worker's; a sender needs the other end")
        link: Link = pipe.end
        link.reported = False
        if process is not None:
            link._peer, link._process, link.registered, link.owner, link.answered = None, process, {}, 0, False
        return link

    @property
    def peer(self) -> Peer | None:
        """The process at the other end, once it is known."""
        if self._peer is None and self._process is not None:
            process = self._process() if callable(self._process) else self._process
            if process is not None and process.pid is not None:
                self._peer = Peer(process=process)
        return self._peer

    @property
    def dead(self) -> bool:
        """Is its process gone, or an end of the pipe closed? What it sent before can still be read."""
        return self.pipe.over or (self.peer is not None and self.peer.dead)

    def __str__(self) -> str:
        if self.peer is not None:
            return str(self.peer)
        return "this end of its pipe is closed" if self.pipe.closed else self.pipe.ended

    def post(self, frame: bytes, tag: Tag) -> None:
        """Send a message that will be answered with this tag; newer weights of the model may take its place."""
        with self.pipe.lock:
            if self.unanswered:
                self.pump()  # what has come before cannot be an answer to it
            if tag.version > self.highest.get(tag.model_id, 0):
                self.highest[tag.model_id] = tag.version
            self.results.pop(tag, None)  # of a send that an exception has ended
            self.unanswered[tag] = True
            if not self.pipe.closed:  # else the wait finds it dead
                for model_id, version in self.pipe.send_frame(frame, tag if tag.version else None):
                    self.unanswered.pop(Tag(model_id, version), None)

    def forget(self, tag: Tag) -> None:
        """Wait no more for this answer; it is dropped when it comes."""
        with self.pipe.lock:
            self.results.pop(tag, None)
            if tag in self.unanswered:
                self.unanswered[tag] = False

    def pump(self, until: Tag | None = None) -> None:
        """Take in what the worker has sent, and write what its pipe takes now. `until`: no more after this answer."""
        pipe = self.pipe
        with pipe.lock:
            if pipe.closed:
                return
            if pipe.unsent:
                pipe.flush()
            while (until is None or until not in self.results) and (found := pipe.receive()) is not None:
                self._sort(found[0])

    def _sort(self, message: Any) -> None:
        answer = messages.read_answer(message)
        if answer is None:
            self.pipe.pending.append(message)
            return
        tag, word, result, owner = answer
        self.answered = True
        if owner and owner != self.owner:
            self.owner = owner
            if (peer := self.peer) is None:
                self._peer = Peer(owner=owner)
            else:
                peer.introduce(owner)
        if word not in (messages.UPDATED, messages.REGISTERED, messages.FAILED):  # send_ack() of another word
            self.pipe.pending.append((None, word))
            result = unexpected(word)
        tag = tag or self._oldest(word)
        if tag is None or (tag not in self.unanswered and tag.version > self.highest.get(tag.model_id, 0)):
            self.pipe.pending.append(message)  # it answers nothing that was sent
        elif self.unanswered.pop(tag, False):
            self.results[tag] = result

    def _oldest(self, word: str) -> Tag | None:
        registration = {messages.REGISTERED: True, messages.UPDATED: False}.get(word)
        for tag in self.unanswered:
            if registration is None or registration == (tag.version == 0):
                return tag
        return None


def unexpected(word: str) -> str:
    """What is wrong with an answer that is none of ours."""
    return f"it answered {word!r}"


def gather(links: Mapping[int, Link], tags: Mapping[int, Tag], deadline: float) -> Outcome:
    """Wait until every worker has answered its message, is dead, or the monotonic time `deadline` is there.

    What is not answered by then is forgotten. Sleeps over all pipes and all processes at once, for a slice at most:
    then it looks at all workers, since another thread may have read an answer, or a process may only now be known.
    """
    outcome = Outcome(WORDING)
    waiting = dict(links)
    poller = select.poll()
    watched: dict[int, tuple[int, bool]] = {}  # by descriptor: the worker, and is it the process?

    def watch(index: int, link: Link) -> bool:
        """Wake up for this worker; False: its pipe has ended, from which no event comes."""
        pipe, peer, over = link.pipe, link.peer, link.pipe.over
        if not over:
            watched[pipe.fd] = index, False
            poller.register(pipe.fd, select.POLLIN | (select.POLLOUT if pipe.unsent else 0))
        if peer is not None and peer.fd is not None and peer.fd not in watched:
            watched[peer.fd] = index, True
            poller.register(peer.fd, select.POLLIN)
        return not over

    # Another thread may have read an answer already.
    ready = [(i, True) for i, link in links.items() if not watch(i, link) or tags[i] in link.results]
    try:
        while waiting:
            for index, may_be_dead in ready:
                if index not in waiting:
                    continue  # both its pipe and its process had an event
                link, tag = waiting[index], tags[index]
                gone = may_be_dead and link.dead  # before the last look: what it sent, it sent before it died
                link.pump(tag)
                if tag in link.results:
                    failure = link.results.pop(tag)
                    if failure is None:
                        outcome.done.append(index)
                    else:
                        outcome.failed[index] = failure
                elif gone or link.pipe.over:
                    outcome.dead[index] = str(link)
                else:
                    watch(index, link)
                    continue
                del waiting[index]
            if not waiting or time.monotonic() >= deadline:
                break
            found = poll(poller, milliseconds(deadline))
            for fd in [fd for fd, _ in found if watched[fd][0] not in waiting]:
                poller.unregister(fd)
            ready = [watched[fd] for fd, _ in found] or [(index, True) for index in waiting]
    finally:
        for index in waiting:
            links[index].forget(tags[index])
    if waiting:
        outcome.add_late({index: link.peer for index, link in waiting.items()})
        silent = [index for index in waiting if not links[index].answered]
        outcome.notes += [f"{listed([index])} never answered: is it still starting?" for index in silent]
    return outcome


class Inbox:
    """The worker's end of a pipe: the messages for each of its models. Shared by the receivers of all models.

    Attributes:
        receivers: by model.
        registered: by model: the arena that the sender named last, and the worker's index there.
        attachments: by model: to that arena. A receiver that is made anew goes on with it.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.registered: dict[str, tuple[Handle, int | None]] = {}
        self.attachments: dict[str, Any] = {}
        self.receivers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._messages: list[Message] = []

    @classmethod
    def of(cls, connection: Any) -> Inbox:
        """That of the pipe's end; the same object each time."""
        pipe = Pipe.of(connection)
        if pipe.end is None:
            pipe.end = cls(pipe)
        if not isinstance(pipe.end, cls):
            raise ValueError("this end of the pipe is a sender's; a receiver needs the other end")
        return pipe.end

    def take(self, wanted: Callable[[Message], bool], deadline: float, most: int | None = None) -> list[Message]:
        """The messages that are wanted, oldest first; none when the monotonic time `deadline` comes first.

        Raises WriterDied when the sender is gone and nothing wanted is left.
        """
        pipe, readable = self.pipe, bool(self._messages)
        while True:
            if readable:
                with pipe.lock:
                    self._read(wanted, most)
                    found: list[Message] = []
                    left: list[Message] = []
                    for message in self._messages:
                        (found if len(found) != most and wanted(message) else left).append(message)
                    if found:
                        self._messages = left
                        return found
                    if pipe.ended:
                        raise WriterDied(f"{pipe.ended}: the sender is gone, so no weights will come; leave the loop")
                if time.monotonic() >= deadline:
                    break
            pipe.wait(deadline)
            readable = True
        # With fork the siblings hold the sender's end too, so that its death does not end the pipe.
        if (sender := dead_parent()) is not None:
            raise WriterDied(f"the sender (pid {sender}) died, so no weights will come; leave the loop")
        return []

    def _read(self, wanted: Callable[[Message], bool], most: int | None) -> None:
        """Sort what is there, until as many as asked for are wanted: the worker's own loop may read what follows."""
        pipe = self.pipe
        pipe.check_open()
        while most is None or sum(map(wanted, self._messages)) < most:
            if (found := pipe.receive()) is None:
                break
            if (message := messages.read_message(found[0])) is None:
                pipe.pending.append(found[0])
            else:
                self._messages.append(message)
