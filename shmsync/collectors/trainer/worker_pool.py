"""The collector's processes, as the trainer sees them: started, read from, stopped (start_and_restart.py says when)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any

from ...engine.outcome import Failure, Outcome, Wording
from ...memory.system.exiting import stay_if_exiting
from ...memory.system.process import Peer, start_process
from ...schemes import WeightSyncScheme
from ...schemes.link.connection import Channel
from ...schemes.link.gather import LinkPoll
from ..options import WorkerSpec
from ..worker.collector_process import BATCH, COLLECT, ERROR, STOP, run

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
        self.orders: list[int] = []  # the buffers that it has to fill
        self.answers: dict[str, Any] = {}  # by word
        self.failure: Failure | None = None
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
        """Raise what it failed with, as an exception that may end a loop or a program, or WorkerDied."""
        if self.failure is None:
            self.process.join(1)  # a fork server reports the exit code a moment after the death
            outcome = Outcome(_WORDING)
            outcome.dead[self.index] = str(self.peer)
            raise outcome.death(_AWAITED, None)
        self._raised = True
        error = self.failure.exception()
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            # StopIteration would end the trainer's loop as if all frames were there, as in PEP 479.
            error = RuntimeError(self.failure.summary)
        raise error from RuntimeError(f"collector worker {self.index} failed:\n{self.failure.trace}")

    def log_loss(self) -> None:
        """Log its failure, unless a call has raised it."""
        if self.failure is not None and not self._raised:
            self._raised = True
            _log.warning("collector worker %d failed:\n%s", self.index, self.failure.trace)

    def send(self, word: str, content: Any = None) -> None:
        """Send a command, as far as the pipe takes it. A no-op for a dead worker: the call that waits for it raises."""
        if not self.channel.closed:
            self.channel.send(pickle.dumps((word, content)))

    def order(self, buffer: int) -> None:
        """Let it fill this buffer."""
        self.orders.append(buffer)
        self.send(COLLECT, buffer)

    def end(self, deadline: float) -> None:
        """Wait until the deadline for the process to stop, then kill it. Idempotent."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.weights.close()
        self._control.close()


class WorkerPool:
    """All workers, by index, and what they use. A wait that a Ctrl-C has ended may be called again."""

    def __init__(self, start_method: str, scheme: WeightSyncScheme) -> None:
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self.members: dict[int, WorkerProcess] = {}
        self.filled: dict[tuple[int, int], None] = {}  # (worker, buffer) of each batch, in the order of arrival
        self.fd = -1  # of the buffers
        self._scheme = scheme
        self._pid = os.getpid()

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker, in place of an earlier one of its index, whose orders it takes over."""
        earlier = self.members.get(spec.index)
        if earlier is not None:
            earlier.joined = False  # a Ctrl-C before the new one has joined: restart() is called again
            earlier.end(0.0)
        member = WorkerProcess(self._context, spec)
        if earlier is not None:
            member.orders = earlier.orders
        self.members[spec.index] = member
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
                del channel.arrived[0]
                if word == ERROR:
                    member.failure = content
                elif word == BATCH:
                    member.delivered = True
                    member.orders.remove(content)
                    self.filled[member.index, content] = None
                else:
                    member.answers[word] = content
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
        deadline = time.monotonic() + 5.0
        try:
            for member in self.members.values():
                member.send(STOP)
            while (living := {i: each for i, each in self.members.items() if not each.dead}) and (
                time.monotonic() < deadline
            ):
                for index, _ in LinkPoll(living).wait(living, deadline):
                    self.read(living[index])
        except BaseException:
            deadline = 0.0
            raise
        finally:
            for member in self.members.values():
                self.read(member)
                member.end(deadline)
                member.log_loss()
            self.members = {}
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            self._scheme.shutdown()
