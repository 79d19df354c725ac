"""Who the workers of a sender are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


def _itself(address: Any) -> Any:
    return address


class Roster(NamedTuple):
    """The workers of a sender, by their addresses: what the scheme's create_transport() takes for each.

    read: gives the addresses; None: they are as they were.
    name: of the argument that they come from.
    live: True: they are read at each send, so workers join and leave by being in the user's list. False: they are read
        once, and then register_worker() changes them.
    key: addresses with the same key are the same worker, which keeps its transport.
    """

    read: Callable[[], Sequence[Any] | None]
    name: str
    live: bool
    key: Callable[[Any], Any] = _itself
