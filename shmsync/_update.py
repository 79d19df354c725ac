"""One update() section: the new version is written in place, and leaving publishes it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from . import _native
from ._write_side import Wanted
from .errors import ForkedHandle

if TYPE_CHECKING:
    from .publisher import Publisher


class Update:
    """What Publisher.update() returns. A class, not a generator: entry and exit cost a microsecond less."""

    def __init__(self, publisher: Publisher, wait: bool, wanted: Wanted, deadline: float) -> None:
        self._publisher = publisher
        self._side = publisher._side
        self._wait = wait
        self._wanted = wanted
        self._deadline = deadline
        self._seconds = 0.0  # spent at the entry

    def __enter__(self) -> TensorDictBase:
        side = self._side
        started = time.perf_counter()
        self._publisher._check()
        side.__enter__()
        try:
            side.refuse_poisoned()
            if self._wait:
                side.refuse_own_section(self._wanted)
            try:
                side.begin(self._deadline)
                if side.arena.slots > 1:
                    side.carry_all()
                elif self._publisher._adopted is not None:
                    side.counts.bytes_copied += self._publisher._adopted.copy_buffers()
                weights = side.arena.weights(side.writer.slot, writable=True)
            except BaseException:  # an interrupt may land anywhere
                side.undo()
                raise
        except BaseException:
            side.__exit__()
            raise
        side.updating_thread = threading.get_ident()
        self._seconds = time.perf_counter() - started
        return weights

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._publisher._generation != _native.fork_generation():
            raise ForkedHandle("this update() was begun in the parent process; only the parent can finish it")
        side = self._side
        started = time.perf_counter()
        side.updating_thread = None
        try:
            if kind is not None:
                side.undo()
                return
            version = side.writer.commit()
            side.counts.updates += 1
            side.counts.publish.add(self._seconds + time.perf_counter() - started)
            if self._wait:
                side.wait_acks(version, self._wanted, self._deadline)
        finally:
            side.__exit__()
