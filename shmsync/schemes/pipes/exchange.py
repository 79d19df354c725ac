"""One wait over all pipes and all worker processes, with one deadline."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence

from ...engine.outcome import Outcome, Wording
from ...memory.system import poll
from .connection import milliseconds
from .messages import Tag
from .sender_end import Link, Result

WORDING = Wording("a worker applies at its next receive()")


def gather(links: Mapping[int, Link], tags: Mapping[int, Sequence[Tag]], deadline: float) -> Outcome:
    """Wait until every worker has answered each of its messages, is dead, or the deadline is there.

    What is not answered by then is forgotten: its answer will be dropped. The slowest worker sets the time.
    """
    outcome = Outcome(WORDING)
    waiting = dict(links)
    try:
        _settle_answered(outcome, waiting, tags)  # a wait for another model may have read them
        watch = _Poll(waiting)
        while waiting:
            for index, readable in watch.news(waiting, deadline):
                if index not in waiting:
                    continue  # its pipe and its process had news
                link = waiting[index]
                end = link.end
                gone = not readable and link.dead  # before the last look: what it sent, it sent before it died
                if not end.channel.closed:
                    end.pump()
                if all(end.answered(tag) for tag in tags[index]):
                    _settle(outcome, index, [end.take(tag) for tag in tags[index]])
                elif gone or end.channel.ended:
                    outcome.dead[index] = str(link)
                else:
                    watch.renew(index, link)
                    continue
                del waiting[index]
                watch.drop(link)
            if waiting and time.monotonic() >= deadline:
                _settle_answered(outcome, waiting, tags)  # another thread may have read them in the last moment
                break
    finally:  # an interrupt may land anywhere
        for index, link in links.items():
            for tag in tags[index]:
                link.end.forget(tag)
    outcome.late = sorted(waiting)
    return outcome


class _Poll:
    """The one poll() over the pipes and the processes of all workers."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._poll = select.poll()
        self._pipes: dict[int, int] = {}
        self._processes: dict[int, int] = {}
        for index, link in links.items():
            self.renew(index, link)

    def renew(self, index: int, link: Link) -> None:
        """Watch for what this worker is waited for now."""
        channel = link.end.channel
        if not channel.closed:
            self._pipes[channel.fd] = index
            self._poll.register(channel.fd, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        peer = link.peer
        if peer is not None and peer.fd is not None and peer.fd not in self._processes:
            self._processes[peer.fd] = index
            self._poll.register(peer.fd, select.POLLIN)

    def drop(self, link: Link) -> None:
        """Watch it no more."""
        peer = link.peer
        for table, fd in ((self._pipes, link.end.channel.fd), (self._processes, None if peer is None else peer.fd)):
            if fd is not None and table.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def news(self, waiting: Mapping[int, Link], deadline: float) -> list[tuple[int, bool]]:
        """(worker, is there something to read?) for each with news; every worker after a slice without any.

        Meanwhile another thread may have read an answer, or a process that nobody knew at first may have died.
        """
        found = poll(self._poll, milliseconds(deadline))
        if not found:
            return [(index, False) for index in list(waiting)]
        return [
            (self._pipes[fd], bool(event & select.POLLIN)) if fd in self._pipes else (self._processes[fd], False)
            for fd, event in found
        ]


def _settle_answered(outcome: Outcome, waiting: dict[int, Link], tags: Mapping[int, Sequence[Tag]]) -> None:
    for index, link in list(waiting.items()):
        if all(link.end.answered(tag) for tag in tags[index]):
            _settle(outcome, index, [link.end.take(tag) for tag in tags[index]])
            del waiting[index]


def _settle(outcome: Outcome, index: int, results: Sequence[Result]) -> None:
    failure = next((result for result in results if result is not None), None)
    if failure is None:
        outcome.done.append(index)
    else:
        outcome.failed[index] = failure
