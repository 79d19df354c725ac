"""What goes over a pipe: pairs that a plain recv() can read.

    sender → worker   ((model_id, weights), "update_weights")            weights by value
                      ((model_id, version), "update_weights")            they lie in an arena, at this version
                      ((model_id, weights), "register_shared_weights")   the arena, as a live TensorDict
    worker → sender   ((model_id, version), "updated"), (None, "registered")
                      (failure, "failed")
                      (None, "updated")                                  for the oldest message without an answer

A pair that has no room for it carries its tag as an attribute (Tagged). All other messages are those of the user's
program: they are kept, and nothing is guessed about them.
"""

from __future__ import annotations

import functools
import pickle
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.outcome import Failure
from ..engine.subscriber import live_weights
from ..memory.process import me
from ..memory.segment import Handle

if TYPE_CHECKING:
    from tensordict import TensorDictBase

UPDATE = "update_weights"
REGISTER = "register_shared_weights"
UPDATED = "updated"
REGISTERED = "registered"
FAILED = "failed"

Tag = tuple[str, int]  # which message an answer is for: (model, version); version 0 is the registration of the model

dumps = functools.partial(pickle.dumps, protocol=5)


def framed(payload: bytes) -> bytes:
    """A pickled message as Connection.send() writes it."""
    size = len(payload)
    return (struct.pack("!i", size) if size < 1 << 31 else struct.pack("!iQ", -1, size)) + payload


class Tagged(tuple[Any, ...]):
    """A pair that also has a tag (None: for the oldest message), and the owner word of the process that sends it."""

    tag: Tag | None
    owner: int

    def __new__(cls, pair: tuple[Any, str], tag: Tag | None, owner: int) -> Tagged:
        """A pair that means `tag`."""
        self = super().__new__(cls, pair)
        self.tag, self.owner = tag, owner
        return self

    def __reduce__(self) -> Any:
        return Tagged, (tuple(self), self.tag, self.owner)


# An object that pickles as a call of its read_by_recv() gives weights to a plain recv(). An end of ours gets the object
# itself, so that nothing fails before it can answer.


class Unpickler(pickle.Unpickler):
    """Of messages for a receiver or a sender of ours."""

    def find_class(self, module: str, name: str) -> Any:
        """As pickle's, but for read_by_recv()."""
        return super().find_class(module, name.removesuffix(".read_by_recv"))


class Registered:
    """An arena, and the worker's index there. A receiver attaches by itself, as that worker."""

    def __init__(self, handle: Handle, worker: int) -> None:
        self.handle, self.worker = handle, worker

    @staticmethod
    def read_by_recv(handle: Handle, worker: int) -> TensorDictBase:
        """The live TensorDict of the arena."""
        weights: Any = live_weights(handle)
        weights.worker = worker
        return weights

    def __reduce__(self) -> Any:
        return Registered.read_by_recv, (self.handle, self.worker)


def registration(model_id: str, handle: Handle, worker: int) -> bytes:
    """The frame that says where the arena of a model is."""
    return framed(dumps(((model_id, Registered(handle, worker)), REGISTER)))


def announcement(tag: Tag) -> bytes:
    """The frame that says that a version lies in the arena."""
    return framed(dumps((tag, UPDATE)))


class Message(NamedTuple):
    """A message as a worker sees it.

    `content`: weights, a version, or what has the `handle` of an arena and the worker's index there, `worker`. `tag`:
    None where the sender is not one of ours.
    """

    kind: str
    model_id: str
    content: Any
    tag: Tag | None

    def answer(self, word: str = "") -> bytes:
        """The frame that says that it is done; in another word if one is given."""
        word = word or (UPDATED if self.kind == UPDATE else REGISTERED)
        if self.tag is None:
            return framed(dumps((None, word)))
        if word == UPDATED and type(self.content) is int:
            return framed(dumps((self.tag, word)))
        return framed(dumps(Tagged((None, word), self.tag, me().owner)))

    def failure(self, error: BaseException) -> bytes:
        """The frame that says that doing it raised this exception."""
        return framed(dumps((Failure.of(error, self.tag), FAILED)))


def read_message(message: Any) -> Message | None:
    """A message for a worker, about weights; None for any other."""
    if not (isinstance(message, tuple) and len(message) == 2 and isinstance(message[1], str)):
        return None
    pair, kind = message
    if not (type(pair) is tuple and len(pair) == 2 and isinstance(pair[0], str)):
        return None
    model_id, content = pair
    if kind == UPDATE:
        tag = (model_id, content) if type(content) is int else None
        if isinstance(message, Tagged):
            tag = message.tag
        return Message(kind, model_id, content, tag)
    if kind == REGISTER and getattr(content, "handle", None) is not None:
        return Message(kind, model_id, content, (model_id, 0))
    return None


def given_message(content: Any, model_id: str) -> Message:
    """What a worker's own loop has read: a whole message, (model_id, content), or the content for this model alone."""
    if (message := read_message(content)) is not None:
        return message
    if type(content) is tuple and len(content) == 2 and isinstance(content[0], str):
        model_id, content = content
    found = read_message(((model_id, content), REGISTER)) or read_message(((model_id, content), UPDATE))
    assert found is not None
    return found


def read_answer(message: Any) -> tuple[Tag | None, str, Failure | None, int] | None:
    """(tag, word, failure, owner word) of an answer of a worker; None for any other message."""
    if not (isinstance(message, tuple) and len(message) == 2 and isinstance(message[1], str)):
        return None
    content, word = message
    if isinstance(message, Tagged):
        return message.tag, word, None, message.owner
    if word == FAILED and isinstance(content, Failure):
        return content.tag, word, content, 0
    if word not in (UPDATED, REGISTERED):
        return None
    if content is None:
        return None, word, None, 0
    if type(content) is tuple and len(content) == 2 and type(content[0]) is str and type(content[1]) is int:
        return content, word, None, 0
    return None
