"""What a collector holds beside its own memory, and gives back at its end, whatever interrupts it."""

from __future__ import annotations

import os

from ...engine.outcome import Failure
from ...schemes import WeightSyncScheme
from .worker_pool import WorkerPool, raise_closing


class Ending:
    """The workers, the scheme and the descriptor of the buffers."""

    def __init__(self, pool: WorkerPool, scheme: WeightSyncScheme) -> None:
        self.fd = -1
        self._pool = pool
        self._scheme = scheme
        self._steps = [self._stop, scheme.shutdown, self._close]
        self._failures: list[tuple[int, Failure]] = []

    def end(self) -> list[tuple[int, Failure]]:
        """End the workers, then what they used. Idempotent. Returns what closing environments raised, once.

        A Ctrl-C meanwhile kills the workers that are still there, and is raised when all is done.
        """
        if self._pool.pid != os.getpid():  # this is a forked child that ends; the workers are the trainer's
            return []
        raised: BaseException | None = None
        while self._steps:
            try:
                self._steps[0]()
                del self._steps[0]
            except KeyboardInterrupt as error:
                raised, self._pool.hurry = error, True  # and the same step once more
            except BaseException as error:
                raised = error if raised is None else raised
                del self._steps[0]
        if raised is not None:
            raise raised
        found, self._failures = self._failures, []
        return found

    def abandon(self) -> None:
        """End it for a collector without shutdown(), where no call can raise an error."""
        raise_closing(self.end(), quietly=True)

    def _stop(self) -> None:
        self._failures += self._pool.stop()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
