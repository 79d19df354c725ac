"""What goes over the connection to a rank: messages, and the answers to them. The weights' bytes do not."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ....engine.outcome import Failure
from ..packed_weights import Announcement

UPDATED = "updated"
FAILED = "failed"
UNTAKEN = "untaken"  # failed, and the bytes were not taken out of the process group: nothing may write there


class RankMessage(NamedTuple):
    """Weights for a rank. Only plain values, so that it always unpickles; what may fail to is in `body`.

    number: the tag of its bytes too: those of one that was not taken are not taken for another's.
    body: a pickled Label or Announcement, by `kind`.
    source, size: with a Label: the rank that sends so many bytes under this number.
    relay: RelayOptions, if this rank publishes them for its node.
    """

    number: int
    kind: Literal["bytes", "announcement"]
    body: bytes
    source: int
    size: int
    relay: tuple[Any, ...] | None


class RelayEnd(NamedTuple):
    """The rank ends what it relays for this session. `ended`: the sender sends no more."""

    session: str
    ended: bool


class Farewell(NamedTuple):
    """The sender waits for no answer any more: the rank leaves out its messages that it has not begun with."""


class RankAnswer(NamedTuple):
    """What a rank answers to the message of this number; None: a word of the worker's own.

    content: of FAILED and UNTAKEN a Failure, of a relay's UPDATED an Announcement, else None.
    """

    number: int | None
    word: str
    content: Any = None


_KINDS: dict[type, tuple[tuple[type, ...], ...]] = {
    RankMessage: ((int,), (str,), (bytes,), (int,), (int,), (tuple, type(None))),
    RelayEnd: ((str,), (bool,)),
    Farewell: (),
    RankAnswer: ((int, type(None)), (str,), (Failure, Announcement, type(None))),
}


def wrong_with(message: Any) -> bool:
    """Is what came none of these, or filled with other kinds of values?"""
    kinds = _KINDS.get(type(message))
    if kinds is None or len(message) != len(kinds):
        return True
    return not all(type(value) in allowed for allowed, value in zip(kinds, message, strict=True))
