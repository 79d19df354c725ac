"""The collector's processes, as the trainer sees them: started, listened to, restarted, stopped."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from ...engine.outcome import Failure
from ...errors import AckTimeout, WorkerDied
from ...memory.system.exiting import stay_if_exiting
from ...memory.system.process import Peer
from ..worker.worker_process import CLOSED, ERROR, HELLO, STOP, WorkerSpec, run
from .control_pipe import ControlPipe

PRELOADED = ["torch", "tensordict", "gymnasium", "cloudpickle", "shmsync.collectors"]
_SLICE = 0.05  # seconds between two looks whether a full pipe takes more

_log = logging.getLogger("shmsync")
Handler = Callable[["WorkerProcess", Any], None]


class WorkerProcess:
    """One worker process and its two pipes: one for weights, one for everything else."""

    def __init__(self, context: Any, spec: WorkerSpec) -> None:
        self.index = spec.index
        self.weights, weights_there = context.Pipe()
        control, control_there = context.Pipe()
        self.control = ControlPipe(control)
        name = f"shmsync-collector-{spec.index}"
        self.process = context.Process(target=run, args=(spec, weights_there, control_there), name=name, daemon=True)
        self.process.start()
        weights_there.close()
        control_there.close()
        self.joined = False  # it has its weights and knows its buffers
        self.delivered = False  # a batch since it was started
        self.told = 0  # the serial of the newest job that it knows
        self.answers: dict[str, tuple[int, Any]] = {}  # by word: the number of the question, and what it said
        self.failure: Failure | None = None
        self.closing: Failure | None = None  # what a close() of an environment raised
        self.over = False  # it is dead, and its messages were all read
        self._raised = False  # its failure was

    @property
    def lost(self) -> bool:
        """Will nothing come from it any more?"""
        return self.over or self.failure is not None

    def raise_loss(self) -> None:
        """Raise what it failed with, or how it died."""
        if self.failure is None:
            raise self.died()
        self._raised = True
        raise exception_of(self.failure) from _trace(self.index, self.failure)

    def log_loss(self) -> None:
        """Log its failure, unless a call has raised it."""
        if self.failure is not None and not self._raised:
            self._raised = True
            _log.warning("collector worker %d failed:\n%s", self.index, self.failure.trace)

    def died(self) -> WorkerDied:
        """The error that says how this worker died."""
        self.process.join(1)
        return WorkerDied(
            f"collector worker {self.index} died ({Peer(process=self.process)}); its unfinished frames are lost. With "
            "restart_workers=True it is started again",
            missing=[self.index],
        )

    def tell(self, word: str, content: Any = None) -> None:
        """Send a command. Does nothing for a dead worker; its death is noticed by the call that waits for it."""
        self.control.send(word, content)

    def end(self, deadline: float) -> None:
        """Wait until the deadline for the process to stop, then kill it. Idempotent."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.weights.close()
        self.control.connection.close()


class WorkerPool:
    """All workers, by index. Any of its waits may be interrupted, and called again."""

    def __init__(self, start_method: str) -> None:
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self.pid = os.getpid()
        self.members: dict[int, WorkerProcess] = {}
        self.hurry = False  # stop() kills at once
        self._handlers: dict[str, Handler] = {}
        self._questions = 0

    def hear(self, word: str, handler: Handler) -> None:
        """Call this with (worker, content) for messages of a word. The handler must be idempotent."""
        self._handlers[word] = handler

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker, in place of an earlier one of its index."""
        earlier = self.members.get(spec.index)
        if earlier is not None:
            earlier.joined = False  # if this is interrupted, it is known that it has to be done again
            earlier.end(0.0)
        member = self.members[spec.index] = WorkerProcess(self._context, spec)
        return member

    def tell_all(self, word: str, content: Any = None) -> None:
        """Send a command to every worker."""
        for member in self.members.values():
            member.tell(word, content)

    def listen(self, member: WorkerProcess) -> None:
        """Take in what has come from a worker."""
        if member.over or member.control.connection.closed:
            return
        gone = member.process.exitcode is not None  # before it is read: what comes after the end is nothing
        while (message := member.control.peek()) is not None:
            word, content = message
            if word == ERROR:
                member.failure = content
            elif word == CLOSED:
                member.closing = content
            elif word in self._handlers:
                self._handlers[word](member, content)
            else:
                member.answers[word] = content
            member.control.drop()
        member.over = gone or member.control.ended

    def wait(self, done: Callable[[], Any], deadline: float, workers: Iterable[int]) -> WorkerProcess | None:
        """Until done(), or one of these workers has failed or died: it is returned.

        Raises AckTimeout when neither is so at the deadline.
        """
        members = [self.members[index] for index in workers]
        for member in members:
            self.listen(member)
        while not done():
            lost = next((member for member in members if member.lost), None)
            if lost is not None:
                return lost
            left = deadline - time.monotonic()
            if left <= 0:
                silent = [member.index for member in members]
                raise AckTimeout(
                    f"collector workers {silent} have not answered in time; is an environment slow or stuck? Give them "
                    "more with timeout=",
                    missing=silent,
                )
            sources: dict[Any, WorkerProcess] = {member.control.connection: member for member in members}
            sources |= {member.process.sentinel: member for member in members}
            # Of all: one that only orders and never waits for this worker may have left something in a full pipe.
            unsent = [member.control.flush() for member in self.members.values() if not member.lost]
            left = min(left, _SLICE) if any(unsent) else left
            ready = wait(list(sources), None if math.isinf(left) else left)
            stay_if_exiting()  # what has come is the end of the workers
            for member in {id(sources[source]): sources[source] for source in ready}.values():
                self.listen(member)
        return None

    def answers(self, word: str, number: int, deadline: float, workers: Iterable[int]) -> dict[int, Any]:
        """Wait until each of these workers has answered this question.

        Raises WorkerDied, AckTimeout, or what a worker failed with.
        """
        asked = list(workers)

        def answered() -> bool:
            return all(self.members[index].answers.get(word, (-1, None))[0] == number for index in asked)

        lost = self.wait(answered, deadline, asked)
        if lost is not None:
            lost.raise_loss()
        return {index: self.members[index].answers[word][1] for index in asked}

    def greet(self, deadline: float, workers: Iterable[int] | None = None) -> None:
        """Wait until these workers have started. Raises as answers() does."""
        self.answers(HELLO, 0, deadline, self.members if workers is None else workers)

    def ask(self, word: str, deadline: float, contents: dict[int, Any] | None = None) -> dict[int, Any]:
        """Ask all workers, each with its content, and wait for their answers. Raises as answers() does."""
        self._questions += 1  # so that the answer to a question that was interrupted counts for no later one
        number = self._questions
        for index, member in self.members.items():
            member.tell(word, (number, None if contents is None else contents[index]))
        return self.answers(word, number, deadline, self.members)

    def stop(self) -> list[tuple[int, Failure]]:
        """End every worker. Idempotent. Returns what closing their environments raised."""
        self.tell_all(STOP)
        deadline = time.monotonic() + (0.0 if self.hurry else 5.0)
        while (living := [member for member in self.members.values() if member.process.exitcode is None]) and (
            left := deadline - time.monotonic()
        ) > 0:
            sources: dict[Any, WorkerProcess] = {member.process.sentinel: member for member in living}
            sources |= {member.control.connection: member for member in living if not member.control.ended}
            unsent = [member.control.flush() for member in living]
            for source in wait(list(sources), min(left, _SLICE) if any(unsent) else left):
                if isinstance(source, Connection):
                    self.listen(sources[source])
        failures = []
        for member in self.members.values():
            self.listen(member)
            member.end(deadline)
            member.log_loss()
            if member.closing is not None:
                failures.append((member.index, member.closing))
        self.members = {}
        return failures


def exception_of(failure: Failure) -> Exception:
    """The worker's exception, as one that an iterator or a whole program may be left with.

    StopIteration would end the trainer's loop as if all frames were there, as in PEP 479.
    """
    error = failure.exception()
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    return RuntimeError(failure.summary)


def raise_closing(failures: list[tuple[int, Failure]], *, quietly: bool) -> None:
    """Raise what closing environments raised; `quietly`: log it, since another error is on its way."""
    for index, failure in failures if quietly else failures[1:]:
        _log.warning("an environment of collector worker %d failed to close:\n%s", index, failure.trace)
    if failures and not quietly:
        index, failure = failures[0]
        raise exception_of(failure) from _trace(index, failure)


def _trace(index: int, failure: Failure) -> RuntimeError:
    return RuntimeError(f"collector worker {index} failed:\n{failure.trace}")
