"""The collector's processes, as the trainer sees them: started, read from, stopped (start_and_restart.py says when)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any

from ...engine.outcome import Outcome, Wording
from ...schemes import WeightSyncScheme
from ...workers.process import EXIT_CODE, Process, leave, wait_for_any
from ..collector_process import BATCH, COLLECT, STOP, run
from ..options import WorkerSpec

PRELOADED = ["torch", "tensordict", "gymnasium", "cloudpickle", "shmsync.collectors"]
_STOPPING = 5.0  # seconds, for environments to close
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


class Member(Process):
    """One worker process; besides its pipe for messages it has one for weights."""

    def __init__(self, context: Any, spec: WorkerSpec) -> None:
        self.index = spec.index
        self.joined = False  # it has its weights and knows its buffers
        self.delivered = False  # a batch since it was started
        self.orders: list[int] = []  # the buffers that it has to fill
        self.answers: dict[str, Any] = {}  # by word
        self.weights, weights_there = context.Pipe()
        try:
            super().__init__(context, f"collector {spec.index}", run, (weights_there, spec), seed=spec.seed)
        finally:
            weights_there.close()

    @property
    def lost(self) -> bool:
        """Will nothing come from it any more?"""
        return self.over or self.failure is not None

    def raise_loss(self) -> None:
        """Raise what it failed with, as an exception that may end a loop or a program, or WorkerDied."""
        if self.failure is None:
            self.process.join(EXIT_CODE)
            outcome = Outcome(_WORDING)
            outcome.dead[self.index] = str(self.peer)
            raise outcome.death(_AWAITED, None)
        self.reported = True
        error = self.failure.exception()
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            # StopIteration would end the trainer's loop as if all frames were there, as in PEP 479.
            error = RuntimeError(self.failure.summary)
        raise error from RuntimeError(f"collector worker {self.index} failed:\n{self.failure.trace}")

    def log_loss(self) -> None:
        """Log its failure, unless a call has raised it."""
        if self.failure is not None and not self.reported:
            self.reported = True
            _log.warning("collector worker %d failed:\n%s", self.index, self.failure.trace)

    def tell(self, word: str, content: Any = None) -> None:
        """Send a command, as far as the pipe takes it. A no-op for a dead worker: the call that waits for it raises."""
        self.send(pickle.dumps((word, content)))

    def order(self, buffer: int) -> None:
        """Let it fill this buffer."""
        self.orders.append(buffer)
        self.tell(COLLECT, buffer)

    def end(self, grace: float) -> None:
        """As Process.end(); closes its pipe for weights too."""
        super().end(grace)
        self.weights.close()


class WorkerPool:
    """All workers, by index, and what they use. A wait that a Ctrl-C has ended may be called again."""

    def __init__(self, start_method: str, scheme: WeightSyncScheme) -> None:
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self.members: dict[int, Member] = {}
        self.filled: dict[tuple[int, int], None] = {}  # (worker, buffer) of each batch, in the order of arrival
        self.fd = -1  # of the buffers
        self._scheme = scheme
        self._pid = os.getpid()

    def start(self, spec: WorkerSpec) -> Member:
        """Start a worker, in place of an earlier one of its index, whose orders it takes over."""
        earlier = self.members.get(spec.index)
        if earlier is not None:
            earlier.joined = False  # a Ctrl-C before the new one has joined: restart() is called again
            earlier.end(0.0)
        member = Member(self._context, spec)
        if earlier is not None:
            member.orders = earlier.orders
        self.members[spec.index] = member
        return member

    def read(self, member: Member) -> None:
        """Handle what a worker has sent, and write what its pipe takes now."""
        member.read()
        while member.received:
            word, content = member.received[0]
            del member.received[0]
            if word == BATCH:
                member.delivered = True
                member.orders.remove(content)
                self.filled[member.index, content] = None
            else:
                member.answers[word] = content

    def wait(self, done: Callable[[], Any], deadline: float, workers: Iterable[int]) -> Member | None:
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
                    member.pipe.flush()
            wait_for_any(waiting, deadline)
            for member in waiting.values():
                self.read(member)
        return None

    def answers(self, word: str, deadline: float, workers: Iterable[int]) -> dict[int, Any]:
        """Wait until each of these workers has sent this word. Returns the content of each.

        Raises WorkerDied, AckTimeout, or what a worker failed with.
        """
        asked = list(workers)
        lost = self.wait(lambda: all(word in self.members[index].answers for index in asked), deadline, asked)
        if lost is not None:
            lost.raise_loss()
        return {index: self.members[index].answers[word] for index in asked}

    def end(self) -> None:
        """End the workers, then what they used. Idempotent. A Ctrl-C meanwhile ends the workers at once."""
        if self._pid != os.getpid():  # this is a forked child that ends; the workers are the trainer's
            return
        try:
            leave(self.members, pickle.dumps((STOP, None)), time.monotonic() + _STOPPING)
        finally:
            for member in self.members.values():
                member.end(0.0)
                member.log_loss()
            self.members = {}
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            self._scheme.shutdown()
