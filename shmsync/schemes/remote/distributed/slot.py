"""A key of a store that both sides change, each in one step, so that neither overwrites what the other has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_ABSENT = "(not set)"


def peek(store: Any, key: str) -> bytes | None:
    """What a key holds; None when it is not set. One request, that never waits.

    get() would wait for a key that somebody deletes at the wrong moment, and lock the store meanwhile.
    """
    value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if value == _ABSENT.encode() else value


class Slot:
    """One key, and the JSON that it holds.

    INV: no two contents that are written are the same but for those that hold nothing new, since what was found is
    compared with what is wanted to see who wrote it. So whatever is added has a unique number in it.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._guess = ""  # what it may hold now, so that a change that finds it so takes one request; "": not set

    def read(self) -> Any:
        """The content; None when there was never any."""
        found = peek(self._store, self._key)
        if found is None:
            return None
        self._guess = found.decode()
        return json.loads(found)

    def change(self, make: Callable[[Any], Any]) -> Any:
        """Replace the content by what `make` gives for it, or for None; the new content.

        `make` may be called again when somebody else has changed it meanwhile; the last call counts.
        """
        while True:
            before = self._guess
            content = make(json.loads(before) if before else None)
            wanted = json.dumps(content)
            found = bytes(self._store.compare_set(self._key, before, wanted)).decode()
            if found == wanted:
                self._guess = wanted
                return content
            # A store gives back what was expected where the key is not set.
            self._guess = "" if found == before else found

    def expect(self, content: Any) -> None:
        """The other side will have made this of it, most likely, when it is changed next."""
        self._guess = json.dumps(content)
