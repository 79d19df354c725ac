"""One wait over all pipes and all worker processes, with one deadline."""

from __future__ import annotations

import pickle
import select
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ...engine.outcome import Failure, Outcome, Wording
from ...errors import ProtocolError
from ...memory.system.calls import poll
from ...memory.system.process import Peer
from .connection import Channel, milliseconds
from .messages import Tag
from .sender_end import Link, Result

WORDING = Wording("a worker applies at its next receive()")


def gather(
    links: Mapping[int, Link], tags: Mapping[int, Sequence[Tag]], deadline: float, *, any_word: bool = False
) -> Outcome:
    """Wait until every worker has answered each of its messages, is dead, or the deadline is there.

    `any_word`: a pair that may be an answer in another word ends the wait for it; else only at the deadline, because it
    may be a message of the worker's own.

    What is not answered by then is forgotten: its answer will be dropped. The slowest worker sets the time.
    """
    outcome = Outcome(WORDING)
    waiting = dict(links)
    try:
        _settle_answered(outcome, waiting, tags)  # a wait for another model may have read them
        _settle_garbage(outcome, waiting)
        watch = LinkPoll(waiting)
        while waiting:
            for index, readable in watch.wait(waiting, deadline):
                if index not in waiting:
                    continue  # its pipe and its process had news
                link = waiting[index]
                end = link.end
                gone = not readable and link.dead  # before the last look: what it sent, it sent before it died
                if not end.channel.closed:
                    end.pump()
                if all(end.answered(tag) for tag in tags[index]):
                    _settle(outcome, index, [end.take(tag) for tag in tags[index]])
                elif any_word and (said := _suspected(link, tags[index])) is not None:
                    outcome.failed[index] = said
                elif end.channel.garbage:
                    outcome.failed[index] = _garbled(index, end.channel.garbage)
                elif (said := end.foreign()) is not None:
                    outcome.failed[index] = _foreign(index, said)
                elif gone or end.channel.ended:
                    outcome.dead[index] = str(link)
                else:
                    watch.renew(index, link)
                    continue
                del waiting[index]
                watch.drop(link)
            if waiting and time.monotonic() >= deadline:
                _settle_answered(outcome, waiting, tags)  # another thread may have read them in the last moment
                _settle_suspects(outcome, waiting, tags)
                _note_reasons(outcome, waiting, tags)
                break
    finally:  # an interrupt may land anywhere
        forget(links, tags)
    outcome.late = sorted(waiting)
    return outcome


def forget(links: Mapping[int, Link], tags: Mapping[int, Sequence[Tag]]) -> None:
    """Wait for none of these answers any more: they are dropped when they come."""
    for index, link in links.items():
        for tag in tags[index]:
            link.end.forget(tag)


def deliver(links: Mapping[int, Link], deadline: float) -> list[int]:
    """Write what has been sent to these workers into their pipes; who has no room for all of it by the deadline."""
    while True:
        waiting = {index: link for index, link in links.items() if not link.dead and link.end.channel.unsent}
        if not waiting or time.monotonic() >= deadline:
            return sorted(waiting)
        LinkPoll(waiting).wait(waiting, deadline)
        for link in waiting.values():
            link.end.pump()


class Watched(Protocol):
    """A worker that a LinkPoll can watch: a Link, or the process of a collector."""

    @property
    def channel(self) -> Channel:
        """The trainer's end of its pipe."""

    @property
    def peer(self) -> Peer | None:
        """Its process, once that is known."""


class LinkPoll:
    """One poll() over the pipes and the processes of several workers."""

    def __init__(self, links: Mapping[int, Watched]) -> None:
        self._poll = select.poll()
        self._pipes: dict[int, int] = {}
        self._processes: dict[int, int] = {}
        for index, link in links.items():
            self.renew(index, link)

    def renew(self, index: int, link: Watched) -> None:
        """Watch for whatever this worker may do next: its pipe may have bytes to send now, or its process be known."""
        channel, peer = link.channel, link.peer
        if not (channel.closed or channel.ended):
            self._pipes[channel.fd] = index
            self._poll.register(channel.fd, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        if peer is not None and peer.fd is not None and peer.fd not in self._processes:
            self._processes[peer.fd] = index
            self._poll.register(peer.fd, select.POLLIN)

    def drop(self, link: Watched) -> None:
        """Stop watching this worker."""
        peer = link.peer
        for table, fd in ((self._pipes, link.channel.fd), (self._processes, None if peer is None else peer.fd)):
            if fd is not None and table.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def wait(self, waiting: Iterable[int], deadline: float) -> list[tuple[int, bool]]:
        """(worker, is its pipe readable?) for each event; after a slice without one, every worker of `waiting`.

        Meanwhile another thread may have read an answer, or a process that was unknown at first may have died.
        """
        found = poll(self._poll, milliseconds(deadline))
        if not found:
            return [(index, False) for index in waiting]
        return [
            (self._pipes[fd], bool(event & select.POLLIN)) if fd in self._pipes else (self._processes[fd], False)
            for fd, event in found
        ]


def _settle_answered(outcome: Outcome, waiting: dict[int, Link], tags: Mapping[int, Sequence[Tag]]) -> None:
    for index, link in list(waiting.items()):
        if all(link.end.answered(tag) for tag in tags[index]):
            _settle(outcome, index, [link.end.take(tag) for tag in tags[index]])
            del waiting[index]


def _settle_garbage(outcome: Outcome, waiting: dict[int, Link]) -> None:
    """Those of whom nothing can be read any more."""
    for index, link in list(waiting.items()):
        if link.end.channel.garbage:
            outcome.failed[index] = _garbled(index, link.end.channel.garbage)
            del waiting[index]


def _garbled(index: int, what: str) -> Failure:
    return _protocol_failure(
        index,
        f"worker {index} has sent bytes that are no message: {what}. Nothing that follows can be read, so its pipe is "
        "lost; register it anew with a new pipe",
    )


def _foreign(index: int, what: str) -> Failure:
    return _protocol_failure(
        index,
        f"worker {index} has answered what is no answer of shmsync: {what}. It was left out, and its pipe goes on; run "
        "the same version of shmsync on both sides, and let nobody else write there",
    )


def _protocol_failure(index: int, said: str) -> Failure:
    """A failure that was found on this side of the pipe, and so has no traceback of the worker's."""
    error = ProtocolError(said, missing=[index])
    return Failure(None, pickle.dumps(error), str(error), f"ProtocolError: {error}\n")


def _settle_suspects(outcome: Outcome, waiting: dict[int, Link], tags: Mapping[int, Sequence[Tag]]) -> None:
    """The time is over: what looked like a wrong answer of a loop that tags nothing was one."""
    for index, link in list(waiting.items()):
        if (said := _suspected(link, tags[index])) is not None:
            outcome.failed[index] = said
            del waiting[index]


def _suspected(link: Link, tags: Sequence[Tag]) -> str | None:
    return next((said for tag in tags if (said := link.end.suspect(tag)) is not None), None)


def _note_reasons(outcome: Outcome, waiting: Mapping[int, Link], tags: Mapping[int, Sequence[Tag]]) -> None:
    for index, link in waiting.items():
        for remark in {remark for tag in tags[index] if (remark := link.end.remark(tag)) is not None}:
            outcome.notes.append(f"worker {index}: {remark}")
        if link.end.channel.partial:
            outcome.notes.append(f"worker {index} has sent {link.end.channel.partial}, and then nothing more")


def _settle(outcome: Outcome, index: int, results: Sequence[Result]) -> None:
    failure = next((result for result in results if result is not None), None)
    if failure is None:
        outcome.done.append(index)
    else:
        outcome.failed[index] = failure
