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
therefore a message that is taken becomes null, in one step, and an answer names its message. A worker looks at the
message itself, so that it does not matter who has heard the bell. No request waits for a key (see peek).
Each model has one sender at a time; what a new one writes takes the place of what the old one left.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
import zlib
from typing import Any, NamedTuple

from ..place import Place

UPDATE = b"update_weights"
UPDATED = b"updated"
FAILED = b"failed"
_TAKEN = "null"
_ABSENT = "(not set)"


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

    def _key(self, name: str) -> str:
        return self._prefix + name

    def has(self, box: str) -> bool:
        """Is this key set?"""
        return bool(self.store.check([self._key(box)]))

    def peek(self, box: str) -> bytes | None:
        """What this key holds; None when it is not set. One request, that never waits.

        get() would wait for a key that somebody deletes at the wrong moment, and lock the store meanwhile.
        """
        value = bytes(self.store.compare_set(self._key(box), _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else value

    def put_message(self, message: dict[str, Any]) -> None:
        """In the sender: announce a message, instead of one that was not taken."""
        self.store.set(self._key("message"), json.dumps(message))
        self.store.set(self._key("in"), UPDATE)

    def take_message(self, *, listen: bool = True) -> dict[str, Any] | None:
        """In the worker: the message; None when there is none, or it was taken before.

        The announcement need not be there: a loop of the user's own may have heard it. Other words stay where they are.

        Args:
            listen: whether to look at the announcement although there is no message.

        Raises RuntimeError for an announcement without a message.
        """
        found = self.peek("message")
        if found is None or found == _TAKEN.encode():
            if listen and self.peek("in") == UPDATE:
                self.store.delete_key(self._key("in"))
                found = self.peek("message")
                if found is None:
                    raise RuntimeError(
                        f"{self._key('in')} announces weights but no sender of shmsync wrote it; send with "
                        "DistributedTransport"
                    )
            if found is None or found == _TAKEN.encode():
                return None
        else:
            self.hush()
        text = found.decode()
        while True:  # a sender may write another one meanwhile
            now = self.store.compare_set(self._key("message"), text, _TAKEN).decode()
            if now == _TAKEN:
                content: dict[str, Any] | None = json.loads(text)
                return content
            text = now

    def hush(self) -> None:
        """In the worker: delete the announcement of a message that is taken without it."""
        if self.peek("in") == UPDATE:
            self.store.delete_key(self._key("in"))

    def put_answer(self, serial: str | None, word: bytes, content: dict[str, Any]) -> None:
        """In the worker: answer the message of this serial number."""
        self.store.set(self._key("answer"), json.dumps({"serial": serial, "word": word.decode(), **content}))
        self.store.set(self._key("out"), word)

    def take_answer(self, serial: str) -> Answer | None:
        """In the sender: the answer to the message of this serial number, or to an earlier one; None: there is none.

        A worker that answers with serial numbers may write other words there for somebody else: they stay.
        """
        word = self.peek("out")
        if word is None:
            return None
        if word not in (UPDATED, FAILED):
            answer = self.last_answer()
            if answer is not None and answer.word != word:
                return answer if answer.serial == serial else None
        self.store.delete_key(self._key("out"))
        answer = self.last_answer()
        # A loop of the user's own writes the word alone.
        return Answer(serial, word, {}) if answer is None else answer

    def last_answer(self) -> Answer | None:
        """In the sender: the last answer, even without its bell."""
        found = self.peek("answer")
        if found is None:
            return None
        content = json.loads(found)
        return Answer(content["serial"], content["word"].encode(), content)

    def introduce(self, place: Place, address: tuple[str, int] | None) -> None:
        """In the worker: say where it runs, and where its end can be seen (see lifeline)."""
        self.store.set(self._key("place"), json.dumps([place, address]))

    def introduced(self) -> tuple[Place, tuple[str, int] | None] | None:
        """In the sender: what introduce() was given; None before that."""
        found = self.peek("place")
        if found is None:
            return None
        place, address = json.loads(found)
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
