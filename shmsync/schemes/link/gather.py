"""One wait over all pipes and all worker processes, with one deadline."""

from __future__ import annotations

import pickle
import select
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ...engine.outcome import Failure, Outcome, Wording
from ...errors import ProtocolError
from ...memory.process import Peer, poll
from .connection import Channel, milliseconds
from .messages import Tag
from .sender_end import Link

WORDING = Wording("a worker applies at its next receive()")


def gather(links: Mapping[int, Link], tags: Mapping[int, Sequence[Tag]], deadline: float) -> Outcome:
    """Wait until every worker has answered each of its messages, is dead, or the deadline is there.

    What is not answered by then is forgotten: its answer will be dropped. The slowest worker sets the time.
    """
    outcome = Outcome(WORDING)
    waiting = dict(links)
    try:
        for index, link in links.items():
            if _settled(outcome, index, link, tags[index]):  # a wait for another model may have read the answers
                del waiting[index]
            elif link.channel.ended and not link.channel.arrived:  # LinkPoll does not watch it any more
                outcome.dead[index] = str(link)
                del waiting[index]
        watch = LinkPoll(waiting)
        while waiting:
            for index, readable in watch.wait(waiting, deadline):
                if index not in waiting:
                    continue  # both its pipe and its process had an event
                link = waiting[index]
                gone = not readable and link.dead  # before the last look: what it sent, it sent before it died
                if not link.channel.closed:
                    link.end.pump()
                if not _settled(outcome, index, link, tags[index]):
                    if gone or link.channel.ended:
                        outcome.dead[index] = str(link)
                    else:
                        watch.renew(index, link)
                        continue
                del waiting[index]
                watch.drop(link)
            if waiting and time.monotonic() >= deadline:
                for index, link in list(waiting.items()):
                    if _settled(outcome, index, link, tags[index]):  # another thread may have read the answer
                        del waiting[index]
                    else:
                        outcome.notes += [f"worker {index}: {reason}" for reason in link.end.reasons(tags[index])]
                        if link.channel.partial:
                            outcome.notes.append(f"worker {index} has sent {link.channel.partial}, and then stopped")
                break
    finally:  # an interrupt may land anywhere
        forget(links, tags)
    outcome.add_late({index: link.peer for index, link in waiting.items()})
    return outcome


def _settled(outcome: Outcome, index: int, link: Link, tags: Sequence[Tag]) -> bool:
    """Put into `outcome` what is known of this worker; False: it may still answer."""
    end = link.end
    if all(end.answered(tag) for tag in tags):
        failed = [result for tag in tags if (result := end.take(tag)) is not None]
        if failed:
            outcome.failed[index] = failed[0]
        else:
            outcome.done.append(index)
    elif link.channel.garbage:
        outcome.failed[index] = _protocol_failure(
            index,
            f"worker {index} has sent bytes that are no message: {link.channel.garbage}. Nothing that follows can be "
            "read, so its pipe is lost; register it again with a new pipe",
        )
    else:
        return False
    return True


def _protocol_failure(index: int, message: str) -> Failure:
    """A failure that was found on this side of the pipe, and so has no traceback of the worker's."""
    error = ProtocolError(message, missing=[index])
    return Failure(None, pickle.dumps(error), str(error), f"ProtocolError: {error}\n")


def forget(links: Mapping[int, Link], tags: Mapping[int, Sequence[Tag]]) -> None:
    """Wait for none of these answers any more: they are dropped when they come."""
    for index, link in links.items():
        for tag in tags[index]:
            link.end.forget(tag)


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
