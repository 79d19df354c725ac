"""The versions of an arena as an iterator: what a worker's loop runs over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ...errors import ClosedError, ProtocolError


class Reads(Protocol):
    """What the loop needs of a subscriber."""

    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def session(self) -> bytes: ...  # noqa: D102
    @property
    def publisher_alive(self) -> bool: ...  # noqa: D102
    def refresh(self) -> bool: ...  # noqa: D102
    def wait_version(self, version: int, timeout: float | None = None) -> int: ...  # noqa: D102


def versions_of(sub: Reads, timeout: float | None, *, follows: bool) -> Iterator[int]:
    """As Subscriber.versions(). `follows`: it was made with follow=True."""
    shown = None  # session and version: those of a followed publisher may begin again
    while True:
        sub.refresh()
        now = sub.session, sub.version
        if now != shown:
            shown = now
            yield sub.version
            continue
        try:
            sub.wait_version(sub.version + 1, timeout)
        except ClosedError:
            if not follows and not sub.publisher_alive:  # which raises if the subscriber is closed
                return
            raise
        sub.refresh()
        if (sub.session, sub.version) == now:
            raise ProtocolError(
                "versions() applies nothing inside a read section; leave the section first", version=sub.version
            )
