"""Lookout: how a publisher's waits for acks learn that a process of Workers has failed or died.

The reader table shows deaths, but neither exceptions nor exit codes. workers/pool.py has the one that is used.
"""

from __future__ import annotations

from typing import Protocol

from ...errors import WorkerDied


class Lookout(Protocol):
    """Watches the processes of an arena's workers."""

    def look(self, version: int) -> None:
        """Called in each slice of a wait for acks of this version, and at its end.

        Raises what a worker failed with, or WorkerDied for a dead one that is not to be started again.
        """

    def explains(self, error: WorkerDied) -> bool:
        """Called when the reader table shows the deaths that `error` names: raise an error that says more.

        Returns True when all of these workers run again, so that `error` is not to be raised.
        """
