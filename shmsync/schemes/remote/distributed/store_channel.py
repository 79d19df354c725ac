"""What trainer and worker tell each other through the store of torch.distributed.

The store is a small key-value server that all ranks reach. It has no queues: a key holds the last value that was set.
For each rank:
    NODE_{rank}_in        update_weights    the sender has a message
    NODE_{rank}_message   JSON: which weights, how large, and how they come; before that, whose relay is to end
    NODE_{rank}_out       updated, or failed, or a word of the worker's own
    NODE_{rank}_answers   JSON: answers of the worker that were not taken yet: to which message, and with what result
    NODE_{rank}_place     JSON: where the worker runs
    LAYOUT_{fingerprint}  the manifest of the weights, once
The bytes of the weights do not go through the store.

INV: `in` and `out` are bells, for loops of the user's own and to save requests; nothing depends on who has read them.
A message is taken, and an answer given and taken, by a change of its Slot in one step, so nothing is lost or taken
twice. An answer names its message; a word of the worker's own names none, and waits for a call that wants it. A bell
rings after its content is there, so it may still ring when that was taken. No request waits for a key (see peek).
Each model has one sender at a time; its message takes the place of the one that an earlier sender left there.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from ....engine.outcome import Failure
from ....errors import ProtocolError
from ..location import Place
from .cas_key import Slot, parsed, peek

UPDATE = b"update_weights"
UPDATED = b"updated"
FAILED = b"failed"
_KEPT = 1000  # answers that no call takes: those of a worker whose words a loop of the user's own reads from `out`


class Answer(NamedTuple):
    """What a worker says about a message, or without one."""

    serial: str | None
    word: bytes
    content: dict[str, Any]


class Said(NamedTuple):
    """What a worker has said so far, as its sender finds it.

    bell: the word of `out`, which may be a loop's of the user's own.
    answers: those that were not taken.
    last: the word of the newest answer of all; None: there never was one, so that the worker answers in its own way.
    """

    bell: bytes | None
    answers: list[Answer]
    last: bytes | None


class Mailbox:
    """One rank's keys in a store. Both ends use it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.rank = rank
        self._prefix = f"NODE_{rank}_"
        self._messages = Slot(store, self._key("message"), _are_messages)
        self._answers = Slot(store, self._key("answers"), _are_answers)
        self._rung: bytes | None = None  # the word that put_answer() wrote last

    def _key(self, name: str) -> str:
        return self._prefix + name

    def peek(self, box: str) -> bytes | None:
        """What this key holds; None when it is not set."""
        return peek(self.store, self._key(box))

    # Messages.

    def put_message(self, message: dict[str, Any]) -> list[str]:
        """In the sender: put a message there, instead of one that was not taken. announce() it then.

        The serial numbers of those whose place it takes: nobody will answer them.
        """
        displaced: list[str] = []

        def put(found: list[dict[str, Any]] | None) -> list[dict[str, Any]]:  # another may have come
            displaced[:] = [each["serial"] for each in found or () if "close" not in each]
            return [*(each for each in found or () if "close" in each), message]

        self._messages.change(put)
        self._messages.expect([])
        return displaced

    def announce(self) -> bool:
        """In the sender: ring for a message. False: a word of the user's own is there, which nobody has read yet."""
        return bytes(self.store.compare_set(self._key("in"), "", UPDATE.decode())) == UPDATE

    def take_message(self, *, listen: bool = True) -> dict[str, Any] | None:
        """In the worker: the oldest message; None when there is none.

        The announcement need not be there: a loop of the user's own may have read it. Other words stay where they are.

        Args:
            listen: whether to look at the announcement although there is no message.

        Raises RuntimeError for an announcement without a message, ProtocolError once for what is no message.
        """
        try:
            found = self._messages.read()
        except ProtocolError:
            self._messages.change(lambda found: found or [])  # told once
            raise
        if not found and listen and self.hush():
            found = self._messages.read()
            if found is None:
                raise RuntimeError(
                    f"{self._key('in')} announces weights but no sender of shmsync wrote it; send with "
                    "DistributedTransport"
                )
        elif found:
            self.hush()
        if not found:
            return None
        taken: dict[str, Any] = {}

        def rest(found: list[dict[str, Any]]) -> list[dict[str, Any]]:  # another may have come
            taken.clear()
            taken.update(found[0] if found else {})
            return found[1:]

        self._messages.change(rest)
        return taken or None

    def hush(self) -> bool:
        """In the worker: delete the announcement of a message; was there one?"""
        heard = self.peek("in") == UPDATE
        if heard:
            self.store.delete_key(self._key("in"))
        return heard

    # Answers.

    def put_answer(self, serial: str | None, word: bytes, content: dict[str, Any]) -> None:
        """In the worker: answer the message of this serial number; None: say a word that answers none."""
        answer = {"id": new_serial(), "serial": serial, "word": word.decode(), **content}

        def more(found: dict[str, Any] | None) -> dict[str, Any]:
            left = [] if found is None else found["left"]
            return {"last": answer["word"], "left": [*left, answer][-_KEPT:]}

        self._answers.change(more)
        self._answers.expect({"last": answer["word"], "left": []})
        before = bytes(self.store.compare_set(self._key("out"), "", word.decode()))
        if before == self._rung:  # what a loop of the user's own has written there stays
            self.store.compare_set(self._key("out"), before.decode(), word.decode())
        self._rung = word

    def said(self, *, listen: bool = True) -> Said:
        """In the sender: what the worker has said. Without `listen` it looks only when the bell rings."""
        bell = self.peek("out")
        found = self._answers.read() if bell is not None or listen else None
        if found is None:
            return Said(bell, [], None)
        answers = [Answer(each["serial"], each["word"].encode(), each) for each in found["left"]]
        return Said(bell, answers, found["last"].encode())

    def forget(self, answers: Iterable[Answer]) -> None:
        """In the sender: these have been taken."""
        taken = {each.content["id"] for each in answers}

        def rest(found: dict[str, Any]) -> dict[str, Any]:
            return {**found, "left": [each for each in found["left"] if each["id"] not in taken]}

        if taken:
            self._answers.change(rest)

    def silence(self) -> None:
        """In the sender: delete the bell."""
        self.store.delete_key(self._key("out"))

    def introduce(self, place: Place, address: tuple[str, int] | None) -> None:
        """In the worker: say where it runs, and where its end can be seen (see lifeline)."""
        self.store.set(self._key("place"), json.dumps([place, address]))

    def introduced(self) -> tuple[Place, tuple[str, int] | None] | None:
        """In the sender: what introduce() was given; None before that."""
        found = self.peek("place")
        if found is None:
            return None
        place, address = parsed(self._key("place"), found, _is_introduction)
        return Place(*place), None if address is None else (address[0], address[1])

    def put_layout(self, fingerprint: str, manifest: bytes) -> None:
        """Write a manifest where all ranks find it."""
        self.store.set(f"LAYOUT_{fingerprint}", manifest)

    def layout(self, fingerprint: str) -> bytes:
        """The manifest of this fingerprint."""
        return bytes(self.store.get(f"LAYOUT_{fingerprint}"))


def _are_messages(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(each, dict) and isinstance(each.get("serial"), str) for each in content
    )


def _are_answers(content: Any) -> bool:
    return isinstance(content["last"], str) and all(
        isinstance(each["id"], str)
        and isinstance(each["word"], str)
        and (each["serial"] is None or isinstance(each["serial"], str))
        for each in content["left"]
    )


def _is_introduction(content: Any) -> bool:
    place, address = content
    reached = address is None or [type(part) for part in address] == [str, int]
    return isinstance(place, list) and len(place) == len(Place._fields) and reached


def new_serial() -> str:
    """A unique message id."""
    return secrets.token_hex(8)


def tag_of(serial: str) -> int:
    """One for the bytes of each message: those of a message that was not taken must not be used for another's."""
    return zlib.crc32(serial.encode()) & 0x7FFFFFFF


def to_text(value: Any) -> str:
    """Anything picklable as text for JSON."""
    return base64.b85encode(pickle.dumps(value)).decode()


def failure(error: BaseException) -> dict[str, Any]:
    """What an answer says of an exception that was just caught."""
    return {"failure": to_text(Failure.of(error))}


def from_text(text: str) -> Any:
    """What to_text() was given. Raises ProtocolError for what is none of it."""
    try:
        return pickle.loads(base64.b85decode(text))
    except (ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ProtocolError(f"a message in the store of torch.distributed cannot be read: {error}") from error
