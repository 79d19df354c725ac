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
import io
import pickle
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
ANSWERS = {UPDATE: UPDATED, REGISTER: REGISTERED}

dumps = functools.partial(pickle.dumps, protocol=5)


class Tag(NamedTuple):
    """Which message an answer is for. Version 0 is the registration of the model."""

    model_id: str
    version: int


class Tagged(tuple[Any, ...]):
    """A pair that also carries a tag (None: for the oldest message), and the owner word of the process that sends it.

    A registration has the worker's index too.
    """

    tag: Tag | None
    owner: int
    worker: int | None

    def __new__(cls, pair: tuple[Any, str], tag: Tag | None, owner: int, worker: int | None = None) -> Tagged:
        """A pair that means `tag`."""
        self = super().__new__(cls, pair)
        self.tag, self.owner, self.worker = tag, owner, worker
        return self

    def __reduce__(self) -> Any:
        return Tagged, (tuple(self), self.tag, self.owner, self.worker)


class Message(NamedTuple):
    """A message as a worker sees it. `tag`: None where the sender is not one of ours."""

    kind: str
    model_id: str
    content: Any
    tag: Tag | None
    worker: int | None = None


class Registered:
    """What a receiver gets in place of the TensorDict of a registration: it attaches by itself, as its own worker."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __reduce__(self) -> Any:
        return registered, (self.handle,)


def registered(handle: Handle) -> TensorDictBase:
    """What a plain recv() makes of a registration: the live TensorDict of the arena."""
    return live_weights(handle)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """As pickle's, but a registration does not attach here."""
        return Registered if (module, name) == (__name__, registered.__name__) else super().find_class(module, name)


_REGISTERS = REGISTER.encode()
_SMALL = 1 << 16  # bytes; a registration has less


def loads(payload: memoryview) -> Any:
    """Unpickle a message for a receiver or a sender of ours."""
    if len(payload) < _SMALL and _REGISTERS in bytes(payload):
        return _Unpickler(io.BytesIO(payload)).load()
    return pickle.loads(payload)


def registration(model_id: str, handle: Handle, worker: int) -> bytes:
    """The message that says where the arena of a model is."""
    pair = ((model_id, Registered(handle)), REGISTER)
    return dumps(Tagged(pair, Tag(model_id, 0), me().owner, worker))


def version_message(model_id: str, version: int) -> bytes:
    """The message that says that this version lies in the arena."""
    return dumps(((model_id, version), UPDATE))


def read_message(message: Any) -> Message | None:
    """A message for a worker, about weights; None for any other."""
    if not (type(message) in (tuple, Tagged) and len(message) == 2 and isinstance(message[1], str)):
        return None
    if message[1] not in (UPDATE, REGISTER):
        return None
    pair, kind = message
    if not (type(pair) is tuple and len(pair) == 2 and isinstance(pair[0], str)):
        return None
    model_id, content = pair
    if isinstance(message, Tagged):
        return Message(kind, model_id, content, message.tag, message.worker)
    if kind == REGISTER:
        return None
    return Message(kind, model_id, content, Tag(model_id, content) if type(content) is int else None)


def given_message(content: Any, model_id: str) -> Message:
    """What a worker's own loop has read: a whole message, (model_id, content), or the content for this model alone."""
    if type(content) in (tuple, Tagged) and (message := read_message(content)) is not None:
        return message
    if type(content) is tuple and len(content) == 2 and isinstance(content[0], str):
        model_id, content = content
    if getattr(content, "handle", None) is not None:
        return Message(REGISTER, model_id, content, Tag(model_id, 0))
    return Message(UPDATE, model_id, content, Tag(model_id, content) if type(content) is int else None)


def answer(message: Message, word: str) -> bytes:
    """The answer to a message of a worker that has done what it says."""
    if message.tag is None:
        return dumps((None, word))
    if message.kind == UPDATE and type(message.content) is int:
        return dumps((tuple(message.tag), word))
    return dumps(Tagged((None, word), message.tag, me().owner))


def failure(message: Message, error: BaseException) -> bytes:
    """The answer of a worker whose call raised this exception."""
    return dumps((Failure.of(error, message.tag), FAILED))


def read_answer(message: Any) -> tuple[Tag | None, str, Any, int] | None:
    """(tag, word, failure, owner word) of an answer of a worker; None for any other message."""
    if not (type(message) in (tuple, Tagged) and len(message) == 2 and isinstance(message[1], str)):
        return None
    content, word = message
    if isinstance(message, Tagged):
        return message.tag, word, None, message.owner
    if word == FAILED and isinstance(content, Failure):
        return content.tag, word, content, 0
    if word in (UPDATED, REGISTERED):
        if content is None:
            return None, word, None, 0
        if type(content) is tuple and len(content) == 2 and type(content[1]) is int:
            return Tag(*content), word, None, 0
    return None
