"""What trainer and worker tell each other through the store of torch.distributed.

For each rank:
    NODE_{rank}_in        update_weights    the sender has a message
    NODE_{rank}_message   JSON: which weights, how large, and how they come; written before
    NODE_{rank}_out       updated, or failed
    NODE_{rank}_answer    JSON: to which message, and with what result; written before
    NODE_{rank}_place     JSON: where the worker runs
    LAYOUT_{fingerprint}  the manifest of the weights, once
The bytes of the weights do not go through the store. Who reads `in` or `out` deletes it.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from typing import Any

from ._place import Place

UPDATE = b"update_weights"
UPDATED = b"updated"
FAILED = b"failed"


class Mailbox:
    """One rank's keys in a store. Both ends use it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.rank = rank
        self._prefix = f"NODE_{rank}_"
        self.closed = False  # whoever waits in arrives() gives up

    def _key(self, name: str) -> str:
        return self._prefix + name

    def put(self, box: str, word: bytes, name: str, content: dict[str, Any]) -> None:
        """Write `content` under `name`, then `word` into the box."""
        self.store.set(self._key(name), json.dumps(content))
        self.store.set(self._key(box), word)

    def has(self, box: str) -> bool:
        """Is something in the box?"""
        return bool(self.store.check([self._key(box)]))

    def arrives(self, box: str, deadline: float) -> bool:
        """Wait until something is."""
        pause = 0.00005
        while self.closed or not self.has(box):
            rest = deadline - time.monotonic()
            if rest <= 0 or self.closed:
                return False
            # Asking is quick; a wait of the store's own that ends by its time-out writes to stderr.
            time.sleep(min(pause, rest))
            pause = min(pause * 1.5, 0.001)
        return True

    def take(self, box: str, name: str) -> tuple[bytes, dict[str, Any]]:
        """What is in the box, and what belongs to it. The box is empty afterwards."""
        word = self.store.get(self._key(box))
        content = {}
        if self.has(name):  # a loop of the user's own writes the word alone
            content = json.loads(self.store.get(self._key(name)))
            self.store.delete_key(self._key(name))
        self.store.delete_key(self._key(box))
        return word, content

    def introduce(self, place: Place, address: tuple[str, int] | None) -> None:
        """In the worker: say where it runs, and where its end can be seen (see _lifeline)."""
        self.store.set(self._key("place"), json.dumps([place, address]))

    def introduced(self) -> tuple[Place, tuple[str, int] | None] | None:
        """In the sender: the same, once it is there."""
        if not self.has("place"):
            return None
        place, address = json.loads(self.store.get(self._key("place")))
        return Place(*place), None if address is None else (address[0], address[1])

    def put_layout(self, fingerprint: str, manifest: bytes) -> None:
        """Write a manifest where all ranks find it."""
        self.store.set(f"LAYOUT_{fingerprint}", manifest)

    def layout(self, fingerprint: str) -> bytes:
        """Read it."""
        return bytes(self.store.get(f"LAYOUT_{fingerprint}"))


def to_text(value: Any) -> str:
    """Anything picklable as text for JSON."""
    return base64.b85encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:
    """Back."""
    return pickle.loads(base64.b85decode(text))
