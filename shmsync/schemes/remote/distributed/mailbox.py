"""What trainer and worker tell each other through the store of torch.distributed.

The store is a small key-value server that all ranks reach. It has no queues: a key holds the last value that was set.
For each rank:
    NODE_{rank}_in        update_weights    the sender has a message
    NODE_{rank}_message   JSON: which weights, how large, and how they come; null when it was taken
    NODE_{rank}_out       updated, or failed
    NODE_{rank}_answer    JSON: to which message, and with what result
    NODE_{rank}_place     JSON: where the worker runs
    LAYOUT_{fingerprint}  the manifest of the weights, once
The bytes of the weights do not go through the store.

INV: `in` and `out` are bells. Whoever rings has written the content before; whoever hears a bell deletes it and only
then reads the content, so nothing that is written later goes unheard. A bell may ring for content that was read before:
therefore a message that is taken becomes null, in one step, and an answer names its message.
Each model has one sender at a time; what a new one writes takes the place of what the old one left.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..place import Place

UPDATE = b"update_weights"
UPDATED = b"updated"
FAILED = b"failed"
_TAKEN = "null"


class Answer(NamedTuple):
    """What a worker says about a message."""

    serial: str | None
    word: bytes
    content: dict[str, Any]


class Mailbox:
    """One rank's keys in a store. Both ends use it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.rank = rank
        self._prefix = f"NODE_{rank}_"
        self.closed = False  # whoever waits in arrives() gives up

    def _key(self, name: str) -> str:
        return self._prefix + name

    def has(self, box: str) -> bool:
        """Is this key set?"""
        return bool(self.store.check([self._key(box)]))

    def arrives(self, box: str, deadline: Callable[[], float]) -> bool:
        """Wait until this key is set, but no longer than a deadline that may change meanwhile; is it?"""
        pause = 0.00005
        while self.closed or not self.has(box):
            rest = deadline() - time.monotonic()
            if rest <= 0 or self.closed:
                return False
            # Asking is quick; a wait of the store's own that ends by its time-out writes to stderr.
            time.sleep(min(pause, rest))
            pause = min(pause * 1.5, 0.001)
        return True

    def put_message(self, message: dict[str, Any]) -> None:
        """In the sender: announce a message, instead of one that was not taken."""
        self.store.set(self._key("message"), json.dumps(message))
        self.store.set(self._key("in"), UPDATE)

    def take_message(self) -> dict[str, Any] | None:
        """In the worker, when `in` is there: the message; None when it was taken before.

        Raises RuntimeError for another word, and for an announcement without a message.
        """
        word = self._hear("in")
        if word != UPDATE:
            raise RuntimeError(f"expected the message 'update_weights' but got {word.decode()!r}")
        if not self.has("message"):
            raise RuntimeError(
                f"{self._key('in')} announces weights but no sender of shmsync wrote it; send with DistributedTransport"
            )
        found = self.store.get(self._key("message")).decode()
        while True:  # a sender may write another one meanwhile
            now = self.store.compare_set(self._key("message"), found, _TAKEN).decode()
            if now == _TAKEN:
                content: dict[str, Any] | None = json.loads(found)
                return content
            found = now

    def put_answer(self, serial: str | None, word: bytes, content: dict[str, Any]) -> None:
        """In the worker: answer the message of this serial number."""
        self.store.set(self._key("answer"), json.dumps({"serial": serial, "word": word.decode(), **content}))
        self.store.set(self._key("out"), word)

    def take_answer(self, serial: str) -> Answer:
        """In the sender, when `out` is there: the answer to the message of this serial number, or to an earlier one."""
        word = self._hear("out")
        answer = self.last_answer()
        if answer is None:  # a loop of the user's own writes the word alone
            return Answer(serial, word, {})
        if answer.serial != serial and word not in (UPDATED, FAILED, answer.word):
            return Answer(serial, word, {})
        return answer

    def last_answer(self) -> Answer | None:
        """In the sender: the last answer, even without its bell: an interrupted take_answer() may have deleted that."""
        if not self.has("answer"):
            return None
        content = json.loads(self.store.get(self._key("answer")))
        return Answer(content["serial"], content["word"].encode(), content)

    def _hear(self, bell: str) -> bytes:
        word = bytes(self.store.get(self._key(bell)))
        self.store.delete_key(self._key(bell))
        return word

    def introduce(self, place: Place, address: tuple[str, int] | None) -> None:
        """In the worker: say where it runs, and where its end can be seen (see lifeline)."""
        self.store.set(self._key("place"), json.dumps([place, address]))

    def introduced(self) -> tuple[Place, tuple[str, int] | None] | None:
        """In the sender: what introduce() was given; None before that."""
        if not self.has("place"):
            return None
        place, address = json.loads(self.store.get(self._key("place")))
        return Place(*place), None if address is None else (address[0], address[1])

    def put_layout(self, fingerprint: str, manifest: bytes) -> None:
        """Write a manifest where all ranks find it."""
        self.store.set(f"LAYOUT_{fingerprint}", manifest)

    def layout(self, fingerprint: str) -> bytes:
        """The manifest of this fingerprint."""
        return bytes(self.store.get(f"LAYOUT_{fingerprint}"))


def new_serial() -> str:
    """A unique message id."""
    return secrets.token_hex(8)


def tag_of(serial: str) -> int:
    """One for the bytes of each message: those of a message that nobody took must not be taken for another's."""
    return zlib.crc32(serial.encode()) & 0x7FFFFFFF


def to_text(value: Any) -> str:
    """Anything picklable as text for JSON."""
    return base64.b85encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:
    """What to_text() was given."""
    return pickle.loads(base64.b85decode(text))
