"""Following a trainer that was started again: the arena that has taken the place of one whose publisher is gone."""

from __future__ import annotations

import warnings

from ...errors import ArenaNotFound, ManifestMismatch, ShmSyncError, WriterDied
from ...memory import attaching, segment
from ...memory.arena import Arena
from ...memory.attaching import Attached
from ...memory.manifest import Leaf, Manifest
from ...memory.process import Peers

_SHOWN = 8  # differences that an error lists


class Successor:
    """Looks for the next arena under a name, and takes a row in it if its layout is the same."""

    def __init__(self, name: str, worker: int | None, peers: Peers) -> None:
        self._name = name
        self._worker = worker
        self._peers = peers
        self._refused: tuple[bytes, ShmSyncError] | None = None  # a session, and why it is not followed
        self._warned: bytes | None = None  # the session that a warning was about

    def find(self, current: Arena) -> Attached | None:
        """The arena that has taken the place of `current`, attached; None when there is none (yet).

        Raises ManifestMismatch when its layout is another one, ArenaCorrupt, ReaderTableFull.
        """
        session = self._session()
        if session is None or session == current.session:
            return None
        if self._refused is not None and self._refused[0] == session:
            raise self._refused[1].with_traceback(None)
        try:
            manifest = segment.attach(self._name, session, 0.0).manifest
            if manifest != current.manifest:
                refusal = ManifestMismatch(
                    f"arena {self._name!r} was published again with another layout, so this subscriber keeps the old "
                    f"weights: {_differences(current.manifest, manifest)}. Publish the same leaves, or attach again"
                )
                self._refused = session, refusal
                raise refusal
            return attaching.attach(self._name, session, self._worker, 0.0, self._peers)
        except (ArenaNotFound, WriterDied):  # gone again, or not ready
            return None

    def warn(self, error: ShmSyncError) -> None:
        """Say once for each session why it is not followed, where the old weights are read on."""
        session = self._session()
        if session != self._warned:
            self._warned = session
            warnings.warn(f"{error}; read sections go on with the old weights", RuntimeWarning, stacklevel=3)

    def _session(self) -> bytes | None:
        try:
            return segment.session_of(self._name)
        except ArenaNotFound:  # another user has the name now
            return None


def _differences(old: Manifest, new: Manifest) -> str:
    found = [f"{leaf.name} is new" for key, leaf in new.by_key.items() if key not in old.by_key]
    for key, leaf in old.by_key.items():
        other = new.by_key.get(key)
        if other is None:
            found.append(f"{leaf.name} is missing")
        elif _shape(other) != _shape(leaf):
            found.append(f"{leaf.name} was {_shape(leaf)} and is {_shape(other)}")
        elif other.strides != leaf.strides:
            found.append(f"{leaf.name} had the strides {leaf.strides} and has {other.strides}")
    found = found or ["the same leaves are laid out in another order, or tied or cast in another way"]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _shape(leaf: Leaf) -> str:
    return f"{leaf.dtype} {leaf.shape}"
