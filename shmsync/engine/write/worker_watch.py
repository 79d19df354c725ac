"""WorkerWatch: how a publisher's waits for acks learn that a process of Workers has failed or died.

The reader table shows deaths, but neither exceptions nor exit codes. workers/pool.py has the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import WorkerDied


class WorkerWatch(NamedTuple):
    """Watches the processes of an arena's workers.

    Attributes:
        look: called in each slice of a wait for acks of this version, and at its end. Raises what a worker failed
            with, or WorkerDied for a dead one that is not to be started again.
        explains: called when the reader table shows the deaths that this error names: raises an error that says more.
            True: all of these workers run again, so the error is not to be raised.
    """

    look: Callable[[int], None]
    explains: Callable[[WorkerDied], bool]
