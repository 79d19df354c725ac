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
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from typing_extensions import override

from ..engine.outcome import Failure, Outcome, Wording, listed
from ..engine.write.acks import as_peer
from ..errors import WriterDied
from ..memory.process import Peer, dead_parent, poll
from ..memory.segment import Handle
from . import messages
from .messages import Message, Tag
from .pipe import Pipe, milliseconds

WORDING = Wording("a worker applies at its next receive()")


class Link(Pipe):
    """A worker as senders know it: a pipe, a process, and the messages that it has not answered.

    The senders of several models share it.

    Attributes:
        unanswered: the tags of messages in the order in which they were sent; False: no send waits any more.
        results: the answers that a send has still to take: the word, or what went wrong.
        highest: by model: the newest version that any sender sent over this pipe.
        peer: the process at the other end, once it is known.
        registered: by model: the arena that the worker was told of last.
        reported: WorkerDied has named it, so that sends leave it out.
        owner: the owner word of its process, once an answer has named it.
        answered: it has answered a message at some time.
    """

    side = "sender"

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.unanswered: dict[Tag, bool] = {}
        self.results: dict[Tag, Failure | str] = {}
        self.highest: dict[str, int] = {}
        self._join()

    @classmethod
    @override
    def of(cls, connection: Any, process: Any = None) -> Link:
        """The link over this end of a pipe. `process`: the worker's, which may be a new one at an old pipe."""
        link = super().of(connection)
        link.reported = False
        if process is not None:
            link._join(process)
        return link

    def _join(self, process: Any = None) -> None:
        """Forget what is known of the process at the other end: it may be a new one. Raises TypeError as as_peer()."""
        started = getattr(process, "pid", 0) is not None
        peer = as_peer(process) if process is not None and started else None
        self.registered: dict[str, Any] = {}
        self.reported = self.answered = False
        self.owner = 0
        self.peer: Peer | None = peer
        self._to_start = None if started else process

    def find_peer(self) -> None:
        """Know the process at the other end, if it was given and runs now."""
        if self._to_start is not None and self._to_start.pid is not None:
            self.peer, self._to_start = as_peer(self._to_start), None

    def __str__(self) -> str:
        if self.peer is not None:
            return str(self.peer)
        return "this end of its pipe is closed" if self.closed else self.ended

    def post(self, frame: bytes, tag: Tag) -> None:
        """Send a message that will be answered with this tag, as far as the pipe takes it; pump() sends the rest.

        Weights take the place of earlier ones of the model that have not begun to leave. Nothing happens when this end
        is closed: the wait finds it dead.
        """
        model_id, version = tag
        with self.lock:
            if self.closed:
                return
            if self.unanswered:
                self.pump()  # what has come before cannot be an answer to it
            if version > self.highest.get(model_id, 0):
                self.highest[model_id] = version
            self.results.pop(tag, None)  # of a send that an exception has ended
            self.unanswered[tag] = True
            if version and self.unsent:
                for each in list(self.unsent):
                    _, done, other = each
                    if other is not None and other[0] == model_id and not done:
                        self.unsent.remove(each)
                        self.unanswered.pop(other, None)
            self.unsent.append((frame, 0, tag if version else None))
            self.flush()

    def forget(self, tag: Tag) -> None:
        """Wait no more for this answer; it is dropped when it comes."""
        with self.lock:
            self.results.pop(tag, None)
            if tag in self.unanswered:
                self.unanswered[tag] = False

    def pump(self, until: Tag | None = None) -> Failure | str | None:
        """Take in what the worker has sent, and write what its pipe takes now.

        `until`: no more after this answer, which is returned, and waited for no more.
        """
        with self.lock:
            if not self.closed:
                if self.unsent:
                    self.flush()
                while (until is None or until not in self.results) and (found := self.receive()) is not None:
                    self._sort(found[0])
            return None if until is None else self.results.pop(until, None)

    @override
    def take_pending(self) -> list[Any]:
        self.pump()
        return super().take_pending()

    def _sort(self, message: Any) -> None:
        answer = messages.read_answer(message)
        if answer is None:
            self.pending.append(message)
            return
        tag, word, failure, owner = answer
        self.answered = True
        if owner and owner != self.owner:
            self.owner = owner
            if self.peer is None:
                self.peer = Peer(owner=owner)
        tag = tag or self._oldest(word)
        if tag is None or (tag not in self.unanswered and tag[1] > self.highest.get(tag[0], 0)):
            self.pending.append(message)  # it answers nothing that was sent
        elif self.unanswered.pop(tag, False):
            self.results[tag] = failure or word
        elif word not in (messages.UPDATED, messages.REGISTERED, messages.FAILED):
            self.pending.append((None, word))  # of a send that waits no more

    def _oldest(self, word: str) -> Tag | None:
        for tag in self.unanswered:
            if (tag[1] == 0) == (word == messages.REGISTERED):
                return tag
        return None


def gather(links: Mapping[int, Link], tags: Mapping[int, Tag], deadline: float, word: str) -> Outcome:
    """Wait until every worker has answered its message, is dead, or the monotonic time `deadline` is there.

    What is not answered by then is forgotten; an answer in another word than `word` is a failure. Sleeps over all pipes
    and all processes at once, for a slice at most: then it looks at all workers, since another thread may have read an
    answer, or a process may only now be known.
    """
    outcome = Outcome(WORDING)
    waiting = dict(links)
    poller = select.poll()
    watched: dict[int, int] = {}  # by the descriptor of a pipe or a process: the worker

    def watch(index: int, link: Link) -> bool:
        """Wake up for this worker; False: its pipe has ended, from which no event comes."""
        if link.peer is None:
            link.find_peer()
        if link.peer is not None and link.peer.fd is not None and link.peer.fd not in watched:
            watched[link.peer.fd] = index
            poller.register(link.peer.fd, select.POLLIN)
        if not link.ended:
            watched[link.fd] = index
            poller.register(link.fd, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        return not link.ended

    # No event comes for a pipe that has ended, or for an answer that another thread has read already.
    ready = {index for index, link in links.items() if not watch(index, link) or tags[index] in link.results}
    late = False
    try:
        while True:
            for index in ready:
                if _record_answer(outcome, index, waiting[index], tags[index], word):
                    del waiting[index]
                else:
                    watch(index, waiting[index])
            if not waiting or late:
                break
            late = time.monotonic() >= deadline  # what is there by then counts
            woken = {fd: watched[fd] for fd, _ in poll(poller, milliseconds(deadline))}
            for fd in [fd for fd, index in woken.items() if index not in waiting]:
                poller.unregister(fd)
            ready = set(waiting) if late else waiting.keys() & woken.values() or set(waiting)
    finally:
        for index in waiting:
            links[index].forget(tags[index])
    if waiting:
        outcome.add_late({index: link.peer for index, link in waiting.items()})
        silent = [index for index in waiting if not links[index].answered]
        outcome.notes += [f"{listed([index])} never answered: is it still starting?" for index in silent]
    return outcome


def _record_answer(outcome: Outcome, index: int, link: Link, tag: Tag, word: str) -> bool:
    """Enter this worker's answer, or its death, into the outcome. False: neither is there yet."""
    result = link.pump(tag)
    if result is None and (link.ended or link.closed or (link.peer is not None and link.peer.dead)):
        result = link.pump(tag)  # what it sent, it sent before it died
        if result is None:
            outcome.dead[index] = str(link)
            return True
    if result == word:
        outcome.done.append(index)
    elif isinstance(result, Failure):
        outcome.failed[index] = result
    elif result is not None:
        outcome.failed[index] = f"it answered {result!r} instead of {word!r}"
        if result != messages.UPDATED:  # a word of the user's own
            link.pending.append((None, result))
    return result is not None


class Inbox(Pipe):
    """The worker's end of a pipe: the messages for each of its models. Shared by the receivers of all models.

    Attributes:
        receivers: by model.
        registered: by model: the arena that the sender named last, and the worker's index there.
        attachments: by model: to that arena. A receiver that is made anew goes on with it.
    """

    side = "receiver"

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.registered: dict[str, tuple[Handle, int]] = {}
        self.attachments: dict[str, Any] = {}
        self.receivers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._left: list[Message] = []  # nobody who took messages wanted these

    def take(self, wanted: Callable[[Message], bool], deadline: float, most: int | None = None) -> list[Message]:
        """The messages that are wanted, oldest first; none when the monotonic time `deadline` comes first.

        All that are there, or as many as `most`, and then nothing beyond them is read: the worker's own loop may read
        what follows. Raises WriterDied when the sender is gone and nothing wanted is left.
        """
        readable = bool(self._left)
        while True:
            if readable:
                with self.lock:
                    if self.closed:
                        raise OSError("this end of the pipe is closed")
                    if self.unsent:
                        self.flush()  # an answer that the pipe had no room for
                    if found := self._sorted(wanted, most):
                        return found
                    if self.ended:
                        raise WriterDied(f"{self.ended}: the sender is gone, so no weights will come; leave the loop")
                if time.monotonic() >= deadline:
                    break
            self.wait(deadline)
            readable = True
        # With fork the siblings hold the sender's end too, so that its death does not end the pipe.
        if (sender := dead_parent()) is not None:
            raise WriterDied(f"the sender (pid {sender}) died, so no weights will come; leave the loop")
        return []

    def _sorted(self, wanted: Callable[[Message], bool], most: int | None) -> list[Message]:
        """The wanted ones of those that were left and of those that have come."""
        found: list[Message] = []
        left, self._left = deque(self._left), []
        while len(found) != most:
            if left:
                message = left.popleft()
            elif (came := self.receive()) is None:
                break
            elif (read := messages.read_message(came[0])) is None:
                self.pending.append(came[0])
                continue
            else:
                message = read
            (found if wanted(message) else self._left).append(message)
        self._left += left
        return found
