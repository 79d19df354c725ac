"""A key of a store that both sides change, each in one step, so that neither overwrites what the other has written."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from typing import Any

from ....errors import ProtocolError

_ABSENT = "(not set)"


def peek(store: Any, key: str) -> bytes | None:
    """What a key holds; None when it is not set. One request, that never waits.

    get() would wait for a key that is deleted at the wrong moment, and lock the store meanwhile.
    """
    value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if value == _ABSENT.encode() else value


def parsed(key: str, found: str | bytes, fits: Callable[[Any], bool]) -> Any:
    """What a key of ours holds, from its JSON. Raises ProtocolError for what no end of ours writes there."""
    try:
        content = json.loads(found)
        if fits(content):
            return content
        why = "of another form"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = str(error)[:200]
    raise ProtocolError(
        f"the store of torch.distributed has under {key!r} {reprlib.repr(found)}, which no end of this scheme wrote "
        f"({why}); see who else uses these keys, and run the same shmsync on all ranks"
    )


class Slot:
    """One key, and the JSON that it holds.

    INV: no two contents that are written are the same but for those that hold nothing new, since what was found is
    compared with what is wanted to see who wrote it. So whatever is added has a unique number in it.
    """

    def __init__(self, store: Any, key: str, fits: Callable[[Any], bool] = lambda _: True) -> None:
        """Use this key. `fits`: is this content one of ours?"""
        self._store = store
        self._key = key
        self._fits = fits
        self._guess = ""  # what it may hold now, so that a change that finds it so takes one request; "": not set

    def read(self) -> Any:
        """The content; None when there was never any. Raises ProtocolError for what no end of ours writes."""
        found = peek(self._store, self._key)
        if found is None:
            return None
        content = self._parsed(found)
        self._guess = found.decode()
        return content

    def _parsed(self, found: str | bytes) -> Any:
        return parsed(self._key, found, self._fits)

    def _parsed_or_none(self, found: str) -> Any:
        try:
            return self._parsed(found)
        except ProtocolError:  # it cannot be used, so it makes room
            return None

    def change(self, make: Callable[[Any], Any]) -> Any:
        """Replace the content by what `make` gives for it, or for None; the new content.

        `make` may be called again when another process has changed it meanwhile; the last call counts.
        """
        while True:
            before = self._guess
            content = make(self._parsed_or_none(before) if before else None)
            wanted = json.dumps(content)
            try:
                found = bytes(self._store.compare_set(self._key, before, wanted)).decode()
            except UnicodeDecodeError:  # no text, so that it cannot even be compared: it makes room
                self._store.delete_key(self._key)
                self._guess = ""
                continue
            if found == wanted:
                self._guess = wanted
                return content
            # A store gives back what was expected where the key is not set.
            self._guess = "" if found == before else found

    def expect(self, content: Any) -> None:
        """The other side will have made this of it, most likely, when it is changed next."""
        self._guess = json.dumps(content)
