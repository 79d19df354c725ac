"""What a writer's waits ask beside the reader table, of the object that started the workers."""

from __future__ import annotations

from typing import Protocol

from ...errors import WorkerDied


class Lookout(Protocol):
    """Watches the processes of an arena's workers."""

    def look(self, version: int) -> None:
        """Called in each slice of a wait for acks of this version, and at its end: raise what ended a worker."""

    def explains(self, error: WorkerDied) -> bool:
        """The reader table shows these deaths: raise an error that says more. True: all of them run again."""
