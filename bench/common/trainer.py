"""A trainer process, which answers the commands of a benchmark over a pipe."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MOST = 20  # samples of one turn
SLOW = 0.1  # seconds; a first call of the turn, which is not timed, would cost more than it is worth


class Trainer:
    """The benchmark's side. The process answers once when it has started, and then each command."""

    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any) -> None:
        self._made_by = context, target, arguments
        self.start()

    def start(self) -> None:
        """Start the process; call it again after the process has ended."""
        context, target, arguments = self._made_by
        self.trouble: str | None = None  # why it no longer takes part
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*arguments, theirs))
        self._process.start()
        theirs.close()

    def send(self, command: tuple[Any, ...]) -> None:
        self._conn.send(command)

    def answer(self, patience: float | None) -> Any:
        """The answer to the oldest command. After TimeoutError, EOFError or RuntimeError send no more commands."""
        if not self._conn.poll(patience):
            raise TimeoutError("hung")
        state, answer = self._conn.recv()
        if state == "failed":
            raise RuntimeError(answer)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, patience: float = 5.0) -> None:
        """Close the pipe, at which the process ends cleanly, and kill it after `patience` seconds; idempotent."""
        self._conn.close()
        self._process.join(patience)
        self._process.kill()
        self._process.join()


def serve(conn: Connection, answer: Callable[..., Any]) -> None:
    """The process' side: until the benchmark closes the pipe."""
    conn.send(("done", None))
    while True:
        try:
            command = conn.recv()
        except EOFError:
            return
        try:
            conn.send(("done", answer(*command)))
        except Exception:
            conn.send(("failed", traceback.format_exc()))


def turn(session: Any, warm_up: Callable[[], object], sample: Callable[[], float], seconds: float) -> list[float]:
    """The samples of one turn. The workers were stopped a moment ago, so the first call is not timed."""
    if session.slowest < SLOW:
        warm_up()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or (time.perf_counter() < end and len(samples) < MOST):
        samples.append(sample())
    session.slowest = max(samples)
    return samples


def why(error: Exception) -> str:
    return "hung" if isinstance(error, TimeoutError) else "failed"
