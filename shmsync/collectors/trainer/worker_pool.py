"""The collector's processes, as the trainer sees them: started, read from, stopped (start_and_restart.py says when)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ...engine.outcome import Failure, Outcome, Wording
from ...memory.system.exiting import stay_if_exiting
from ...memory.system.process import Peer, start_process
from ...schemes import WeightSyncScheme
from ...schemes.link.connection import Channel
from ...schemes.link.gather import LinkPoll
from ..options import WorkerSpec
from ..worker.collector_process import BATCH, CLOSED, ERROR, STOP, run

PRELOADED = ["torch", "tensordict", "gymnasium", "cloudpickle", "shmsync.collectors"]
_AWAITED = "the next message of a collector's workers"
_WORDING = Wording(
    "an environment may be slow or stuck",
    sent="was awaited",
    do="send it",
    doing="sending it",
    after_death="Its unfinished frames are lost; restart_workers=True restarts such a worker",
    after_lateness="Give more time with timeout=",
)

_log = logging.getLogger("shmsync")


class WorkerProcess:
    """One worker process and its two pipes: one for weights, one for everything else."""

    def __init__(self, context: Any, spec: WorkerSpec) -> None:
        self.index = spec.index
        self.weights, weights_there = context.Pipe()
        self._control, control_there = context.Pipe()
        self.channel = Channel.of(self._control)
        name = f"shmsync-collector-{spec.index}"
        self.process = context.Process(target=run, args=(spec, weights_there, control_there), name=name, daemon=True)
        start_process(self.process)
        self.peer = Peer(process=self.process)
        weights_there.close()
        control_there.close()
        self.joined = False  # it has its weights and knows its buffers
        self.delivered = False  # a batch since it was started
        self.newest_job = 0  # the serial of the newest job that was sent to it
        self.answers: dict[str, tuple[int, Any]] = {}  # by word: the number of the question, and the answer
        self.failure: Failure | None = None
        self.closing: Failure | None = None  # what a close() of an environment raised
        self.over = False  # it is dead, and its messages were all read
        self._raised = False  # its failure was

    @property
    def dead(self) -> bool:
        """Has the process ended? What it sent before can still be read."""
        return self.peer.dead or self.process.exitcode is not None  # the second also where there are no pidfds

    @property
    def lost(self) -> bool:
        """Will nothing come from it any more?"""
        return self.over or self.failure is not None

    def raise_loss(self) -> None:
        """Raise what it failed with, or WorkerDied."""
        if self.failure is None:
            self.process.join(1)  # a fork server reports the exit code a moment after the death
            outcome = Outcome(_WORDING)
            outcome.dead[self.index] = str(self.peer)
            raise outcome.death(_AWAITED, None)
        self._raised = True
        raise_error(self.index, self.failure)

    def log_loss(self) -> None:
        """Log its failure, unless a call has raised it."""
        if self.failure is not None and not self._raised:
            self._raised = True
            _log.warning("collector worker %d failed:\n%s", self.index, self.failure.trace)

    def send(self, word: str, content: Any = None) -> None:
        """Send a command, as far as the pipe takes it. A no-op for a dead worker: the call that waits for it raises."""
        if not self.channel.closed:
            self.channel.send(pickle.dumps((word, content)))

    def end(self, deadline: float) -> None:
        """Wait until the deadline for the process to stop, then kill it. Idempotent."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.weights.close()
        self._control.close()


class WorkerPool:
    """All workers, by index, and what they use. Any of its waits may be interrupted, and called again."""

    def __init__(self, start_method: str, scheme: WeightSyncScheme) -> None:
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self.members: dict[int, WorkerProcess] = {}
        self.on_batch: Callable[[WorkerProcess, Any], None]  # gets what a BATCH says; idempotent
        self.fd = -1  # of the buffers
        self._questions = 0
        self._pid = os.getpid()
        self._hurry = False  # kill the workers at once
        self._closing = [self._stop, scheme.shutdown, self._close_buffers]  # what end() has to do yet
        self._failures: list[tuple[int, Failure]] = []  # what closing environments raised

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker, in place of an earlier one of its index."""
        earlier = self.members.get(spec.index)
        if earlier is not None:
            earlier.joined = False  # if this is interrupted, it is known that it has to be done again
            earlier.end(0.0)
        member = self.members[spec.index] = WorkerProcess(self._context, spec)
        return member

    def read(self, member: WorkerProcess) -> None:
        """Handle what a worker has sent, and write what its pipe takes now."""
        channel = member.channel
        if member.over or channel.closed:
            return
        gone = member.dead  # before the last look: what it sent, it sent before it died
        channel.flush()
        try:
            while (found := channel.peek()) is not None:
                word, content = found[0]
                if word == ERROR:
                    member.failure = content
                elif word == CLOSED:
                    member.closing = content
                elif word == BATCH:
                    self.on_batch(member, content)
                else:
                    member.answers[word] = content
                del channel.arrived[0]  # last: an interrupted read() handles the message again
        except EOFError:
            gone = True
        member.over = gone

    def wait(self, done: Callable[[], Any], deadline: float, workers: Iterable[int]) -> WorkerProcess | None:
        """Until done(), or one of these workers has failed or died: it is returned.

        Raises AckTimeout when neither is so at the deadline.
        """
        waiting = {index: self.members[index] for index in workers}
        for member in waiting.values():
            self.read(member)
        while not done():
            lost = next((member for member in waiting.values() if member.lost), None)
            if lost is not None:
                return lost
            if time.monotonic() >= deadline:
                outcome = Outcome(_WORDING)
                outcome.add_late({index: member.peer for index, member in waiting.items()})
                raise outcome.lateness(_AWAITED, None)
            for member in self.members.values():  # also those that are not waited for
                if not member.lost:
                    member.channel.flush()
            for index, _ in LinkPoll(waiting).wait(waiting, deadline):
                stay_if_exiting()  # this process exits, and so its workers end
                self.read(waiting[index])
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

    def ask(self, word: str, deadline: float, contents: dict[int, Any] | None = None) -> dict[int, Any]:
        """Ask all workers, each with its content, and wait for their answers. Raises as answers() does."""
        self._questions += 1  # so that the answer to a question that was interrupted counts for no later one
        number = self._questions
        for index, member in self.members.items():
            member.send(word, (number, None if contents is None else contents[index]))
        return self.answers(word, number, deadline, self.members)

    def end(self) -> list[tuple[int, Failure]]:
        """End the workers, then what they used. Idempotent. Returns what closing environments raised, once.

        A Ctrl-C meanwhile kills the workers that are still there, and is raised when all is done.
        """
        if self._pid != os.getpid():  # this is a forked child that ends; the workers are the trainer's
            return []
        raised: BaseException | None = None
        while self._closing:
            try:
                self._closing[0]()
                del self._closing[0]
            except KeyboardInterrupt as error:
                raised, self._hurry = error, True  # and the same step once more
            except BaseException as error:
                raised = error if raised is None else raised
                del self._closing[0]
        if raised is not None:
            raise raised
        found, self._failures = self._failures, []
        return found

    def abandon(self) -> None:
        """End it for a collector without shutdown(), where no call can raise an error."""
        raise_closing(self.end(), quietly=True)

    def _stop(self) -> None:
        for member in self.members.values():
            member.send(STOP)
        deadline = time.monotonic() + (0.0 if self._hurry else 5.0)
        while (living := {i: each for i, each in self.members.items() if not each.dead}) and (
            time.monotonic() < deadline
        ):
            for index, _ in LinkPoll(living).wait(living, deadline):
                self.read(living[index])
        for member in self.members.values():
            self.read(member)
            member.end(deadline)
            member.log_loss()
        self._failures += [(each.index, each.closing) for each in self.members.values() if each.closing is not None]
        self.members = {}

    def _close_buffers(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def raise_error(index: int, failure: Failure) -> NoReturn:
    """Raise a worker's exception, as one that an iterator or a whole program may be left with.

    StopIteration would end the trainer's loop as if all frames were there, as in PEP 479.
    """
    error = failure.exception()
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        error = RuntimeError(failure.summary)
    raise error from RuntimeError(f"collector worker {index} failed:\n{failure.trace}")


def raise_closing(failures: list[tuple[int, Failure]], *, quietly: bool) -> None:
    """Raise what closing environments raised; `quietly`: log it, since another error is on its way."""
    for index, failure in failures if quietly else failures[1:]:
        _log.warning("an environment of collector worker %d failed to close:\n%s", index, failure.trace)
    if failures and not quietly:
        raise_error(*failures[0])
