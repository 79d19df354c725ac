"""Ctrl-C and SIGTERM as a question that the loops ask, not an exception that lands anywhere."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """Inside `with Stop() as stop:` the first SIGINT or SIGTERM only makes `stop` true.

    An exception out of nowhere could land inside `pub.update()` and leave half an optimiser step in the
    arena. A second signal takes the default action, which ends the process at once; the actors notice.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """Exit status by the shell's custom: 128 + the number of the signal."""
        return 128 + (self.signal or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def __enter__(self) -> Stop:
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
