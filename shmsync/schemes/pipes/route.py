"""The quick way of one send to all workers: one message to each, one answer from each, in one native call.

Whatever is not the common case, it leaves in the pipes and to _exchange.gather().
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from ... import _native
from ...engine.publisher import Publisher
from ...engine.timing import slice_until
from ...memory.manifest import Key
from .exchange import Link
from .messages import Tag

_MOMENT = 2_000_000  # ns; other threads that share a pipe wait so long for their turn


class Route:
    """All workers of one arena, prepared."""

    def __init__(self, links: Mapping[int, Link], publisher: Publisher, optional: Container[Key]) -> None:
        self.links = links
        # Every route locks in one order.
        links = dict(sorted(links.items(), key=lambda item: item[1].answers.channel.fd))
        self.publisher = publisher
        self.optional = optional
        self._indices = list(links)
        self._answers = [link.answers for link in links.values()]
        self._fds = [answers.channel.fd for answers in self._answers]
        peers = [link.peer for link in links.values()]
        self._processes = [peer.fd for peer in peers if peer is not None and peer.fd is not None]
        self.complete = len(self._processes) == len(peers)  # else some process may become known yet

    def exchange(self, message: bytes, answer: bytes, tag: Tag, deadline: float) -> list[int]:
        """Send `message` to all, and wait a moment for `answer` from all. Those that still owe it, and for whom the
        tag is awaited."""
        locked = []
        try:
            for answers in self._answers:
                answers.lock.acquire()
                locked.append(answers.lock)
            if not all(answers.idle for answers in self._answers):
                for answers in self._answers:
                    answers.send(message, tag, replaceable=True)
                return self._indices
            moment = min(slice_until(deadline), _MOMENT)
            left, done = _native.exchange_frames(self._fds, self._processes, message, answer, moment)
            if len(done) == len(self._fds):
                return []
            for position, sent in left:
                self._answers[position].channel.resume(message, sent, tag)
            late = sorted(set(range(len(self._fds))) - set(done))
            for position in late:
                self._answers[position].expect(tag)
            return [self._indices[position] for position in late]
        finally:
            for lock in locked:
                lock.release()
