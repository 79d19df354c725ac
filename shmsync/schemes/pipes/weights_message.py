"""The weights of one message, in the two forms in which they may travel to a worker.

As bytes in the message; or, when they are large and the worker has shown that it can open what its sender has, as a
sealed memfd that is written once for all workers. The message then says where it is: unpickled, by a plain
recv() too, it is weights like any others.
"""

from __future__ import annotations

import pickle
from typing import Any

from ...errors import ShmSyncError
from ...memory.process import me
from ...memory.slab import MemfdAt, Sealed, pieces_at
from ..link import messages
from ..link.messages import Tag, Tagged
from ..pickling import dumps, dumps_apart, small

LARGE = 1 << 20  # bytes from which on weights travel beside the message; see docs/performance.md
_APART = 4096  # bytes of a tensor from which on it lies beside the others in the memfd


class Unreadable:
    """In the place of weights that could not be read."""

    def __init__(self, error: ShmSyncError) -> None:
        self.error = error


class WeightsMessage:
    """A message with weights; read from its source when it is made.

    Args:
        apart: are they to travel beside the message, if there is memory for that?
    """

    def __init__(self, tag: Tag, weights: Any, *, apart: bool = False) -> None:
        self._tag = tag
        self._sealed: Sealed | None = None
        self._bytes: bytes | None = None
        if apart:
            self._head, pieces = dumps_apart(weights, _APART)
            try:
                self._sealed = Sealed(pieces)
            except ShmSyncError:
                pass  # no descriptor or memory for it: as bytes it needs less at once
        self.is_apart = self._sealed is not None  # may messages of it lead to what this process keeps?
        if not self.is_apart:
            self._bytes = self._by_value(weights)

    def reference(self) -> bytes:
        """The message that says where the weights are."""
        assert self._sealed is not None
        where = _Where(self._head, self._sealed)
        return small(Tagged(((self._tag.model_id, where), messages.UPDATE), self._tag, me().owner))

    def by_value(self) -> bytes:
        """The message that holds them."""
        if self._bytes is None:
            assert self._sealed is not None
            self._bytes = self._by_value(opened(self._head, self._sealed.place, self._sealed.spans))
        return self._bytes

    def _by_value(self, weights: Any) -> bytes:
        return dumps(Tagged(((self._tag.model_id, weights), messages.UPDATE), self._tag, me().owner))


class _Where:
    """Pickles as a call that gives the weights."""

    def __init__(self, head: bytes, sealed: Sealed) -> None:
        self._content = head, sealed.place, sealed.spans

    def __reduce__(self) -> tuple[Any, ...]:
        return opened, self._content


def opened(head: bytes, place: MemfdAt, spans: list[tuple[int, int]]) -> Any:
    """Weights that lie in a sealed memfd of another process; Unreadable if they cannot be had."""
    try:
        return pickle.loads(head, buffers=pieces_at(place, spans))
    except ShmSyncError as error:
        return Unreadable(error)
