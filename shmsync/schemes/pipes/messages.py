"""What goes over a pipe: messages and answers, as bytes that a plain recv() can read.

    sender → worker   ((model_id, weights), "update_weights")            weights by value
                      ((model_id, version), "update_weights")            they lie in an arena, at this version
                      ((model_id, handle), "register_shared_weights")    where the arena is
                      ((model_ids, (number, version)), "prepare_weights")
                                                                         stay in receive() until all of these models are
                                                                         there at this version,
                      ((model_ids, (number, version)), "resume")         or until this says that they do not come
    worker → sender   (None, "updated") and (None, "registered")
                      ((model_id, version), "updated")                   for a version in an arena
                      (None, "prepared")
                      (failure, "failed")

Each is a plain pair to whoever reads it with recv(). Those that have no room for a tag carry it as an attribute, so
that an answer names the message that it answers. Untagged answers count for the oldest message without an answer.
"""

from __future__ import annotations

import io
import pickle
import traceback
from typing import Any, NamedTuple

import torch
from torch import nn

UPDATE = "update_weights"
REGISTER = "register_shared_weights"
PREPARE = "prepare_weights"
RESUME = "resume"
UPDATED = "updated"
REGISTERED = "registered"
PREPARED = "prepared"
FAILED = "failed"
MESSAGES = (UPDATE, REGISTER, PREPARE, RESUME)


class Tag(NamedTuple):
    """Which message an answer is for. Version 0 is the registration of the model."""

    model_id: str
    version: int


class Tagged(tuple[Any, ...]):
    """A pair that also carries a tag, and who it is from or for."""

    tag: Tag
    who: int  # in an answer the owner word of the process that gave it; in a registration the worker's index

    def __new__(cls, pair: tuple[Any, str], tag: Tag, who: int = 0) -> Tagged:
        self = super().__new__(cls, pair)
        self.tag = tag
        self.who = who
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Tagged, (tuple(self), self.tag, self.who)


class Failure(NamedTuple):
    """An exception on its way from a worker to the sender."""

    tag: Tag | None
    error: bytes | None  # pickled; None when it cannot be
    summary: str  # one line
    trace: str  # as the worker would print it

    @classmethod
    def of(cls, error: BaseException, tag: Tag | None) -> Failure:
        """Pack an exception that was just caught."""
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        if not isinstance(error, Exception):  # its Ctrl-C or exit() is not the sender's
            return cls(tag, None, summary, traceback.format_exc())
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)  # some pickle, and fail on the way back
        except Exception:
            return cls(tag, None, summary, traceback.format_exc())
        return cls(tag, packed, summary, traceback.format_exc())

    def exception(self) -> BaseException:
        """The worker's exception, or a RuntimeError that quotes it."""
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
                if isinstance(error, BaseException):
                    return error
            except Exception:  # its class is not here
                pass
        return RuntimeError(self.summary)


def is_message(message: object) -> bool:
    """Is it one of ours, for a worker?"""
    if not (is_answer_like(message) and isinstance(message, tuple) and message[1] in MESSAGES):
        return False
    content = message[0]
    return isinstance(content, tuple) and len(content) == 2 and isinstance(content[0], (str, tuple))


def is_answer_like(message: object) -> bool:
    """Does it have the shape of an answer, whatever it says?"""
    return isinstance(message, tuple) and len(message) == 2 and isinstance(message[1], str)


def small(message: object) -> bytes:
    """Pickled; for messages without tensors. The same message gives the same bytes on both sides."""
    return pickle.dumps(message, protocol=5)


def dumps(message: object) -> bytes:
    """Pickled, tensors by value: multiprocessing's pickle would move the trainer's own tensors into shared memory."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, nn.Parameter) and _plain(obj):
            obj = obj.detach().cpu().contiguous()
            data = obj.view(-1).view(torch.uint8).numpy() if obj.numel() else b""
            return _tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)
