"""What goes over a pipe: messages and answers, as pairs that a plain recv() can read.

    sender → worker   ((model_id, weights), "update_weights")            weights by value
                      ((model_id, version), "update_weights")            they lie in an arena, at this version
                      ((model_id, handle), "register_shared_weights")    where the arena is
    worker → sender   (None, "updated") and (None, "registered")
                      ((model_id, version), "updated")                   for a version in an arena
                      (failure, "failed")
                      ((model_id, model_ids), "no receiver")             no answer: that model has no receiver there so
                                                                         far, only these have

Those that have no room for a tag carry it as an attribute, so that an answer names the message that it answers.
Untagged answers count for the oldest message without an answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

from ...engine.outcome import Failure
from ...memory.segment import Handle

UPDATE = "update_weights"
REGISTER = "register_shared_weights"
UPDATED = "updated"
REGISTERED = "registered"
FAILED = "failed"
UNKNOWN = "no receiver"
ANSWERS = (UPDATED, REGISTERED, FAILED)


class Tag(NamedTuple):
    """Which message an answer is for. Version 0 is the registration of the model."""

    model_id: str
    version: int


class Tagged(tuple[Any, ...]):
    """A pair that also carries a tag, and whom it is from or for."""

    tag: Tag | None  # None: for the oldest message of its kind
    who: int  # the owner word of the process that has sent it; in a registration the worker's index
    reaches: bool  # in an answer: can its process open what the sender has?

    def __new__(cls, pair: tuple[Any, str], tag: Tag | None, who: int = 0, reaches: bool = False) -> Tagged:
        """A pair that means `tag`."""
        self = super().__new__(cls, pair)
        self.tag = tag
        self.who = who
        self.reaches = reaches
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Tagged, (tuple(self), self.tag, self.who, *([True] if self.reaches else []))


class Message(NamedTuple):
    """A message as its worker understands it."""

    kind: str
    model_id: str
    content: Any  # weights, a version, a handle
    tag: Tag | None  # None: from a sender that tags nothing
    worker: int | None = None  # of REGISTER: the index that the sender has given this worker
    sender: int = 0  # of UPDATE with weights: the owner word of the process that has sent them; 0: unknown

    @classmethod
    def of(cls, message: Any) -> Message:
        """Of what was read from the pipe."""
        (model_id, content), kind = message
        tag, who = (message.tag, message.who) if isinstance(message, Tagged) else (None, None)
        if kind == REGISTER:
            return cls(kind, model_id, content, Tag(model_id, 0), who)
        if tag is None and isinstance(content, int):
            tag = Tag(model_id, content)
        return cls(kind, model_id, content, tag, sender=who or 0)


def given_message(content: Any, model_id: str, worker: int | None) -> Message:
    """What a worker's own loop has read: a whole message, (model_id, content), or the content for this model alone."""
    if is_message(content):
        message = Message.of(content)
        return message._replace(worker=worker if message.worker is None else message.worker)
    if type(content) is tuple and len(content) == 2 and isinstance(content[0], str):  # no Handle, which is a tuple too
        model_id, content = content
    if isinstance(content, Handle):
        return Message(REGISTER, model_id, content, Tag(model_id, 0), worker)
    number = isinstance(content, int) and not isinstance(content, bool)
    return Message(UPDATE, model_id, content, Tag(model_id, content) if number else None)


def is_message(message: object) -> bool:
    """Is it one of ours, for a worker?"""
    if not (_is_pair(message) and isinstance(message[1], str) and _is_pair(message[0])):
        return False
    (model_id, content), kind = message
    if not isinstance(model_id, str) or (isinstance(message, Tagged) and not _is_signed(message)):
        return False
    if kind == REGISTER:
        return isinstance(content, Handle)
    return kind == UPDATE


def is_answer(message: object) -> bool:
    """Is it an answer of a worker? All other messages are those of the worker's program."""
    if not (_is_pair(message) and isinstance(message[1], str)):
        return False
    content, word = message
    if isinstance(message, Tagged):
        unknown = _is_pair(content) and isinstance(content[1], tuple)
        return _is_signed(message) and word != FAILED and (word != UNKNOWN or unknown)
    if word == FAILED:
        return isinstance(content, Failure) and (content.tag is None or is_tag(content.tag))
    return word in (UPDATED, REGISTERED) and (content is None or is_tag(content))


def _is_signed(message: Tagged) -> bool:
    return (message.tag is None or is_tag(message.tag)) and (message.who is None or type(message.who) is int)


def is_tag(tag: object) -> bool:
    """Does it name a message, or a version of a model?"""
    return _is_pair(tag) and tuple(map(type, tag)) == (str, int)


def _is_pair(content: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(content, tuple) and len(content) == 2
