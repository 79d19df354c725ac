"""The collector's workers as the trainer sees them: started, read from, started again after a death, ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ..engine.outcome import Outcome, Wording
from ..errors import DataMismatch, WorkerDied
from ..schemes import WeightSyncScheme
from ..schemes.devices import WorkerDevices
from ..workers.process import EXIT_CODE, Process, leave, wait_for_any
from . import buffers
from .collector_process import BATCH, COLLECT, HELLO, LAYOUT, START, STOP, run
from .options import CollectorOptions, WorkerSpec

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
    """All workers, by index, and what they use. A wait or a restart that a Ctrl-C has ended may be called again."""

    def __init__(
        self,
        specs: list[WorkerSpec],
        scheme: WeightSyncScheme,
        options: CollectorOptions,
        devices: WorkerDevices,
        start_method: str,
    ) -> None:
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self.members: dict[int, Member] = {}
        self.filled: dict[tuple[int, int], None] = {}  # (worker, buffer) of each batch, in the order of arrival
        self.restarts = 0
        self._specs = specs
        self._scheme = scheme
        self._options = options
        self._devices = devices
        self._fd = -1  # of the buffers
        self._pid = os.getpid()

    def start(self, policy: nn.Module) -> None:
        """Start all workers, send them their first weights, and give them their rows of the batches."""
        deadline = time.monotonic() + self._options.start_timeout
        members = [self._start_process(spec) for spec in self._specs]
        self._answers(HELLO, deadline, self.members)
        places = self._devices.distinct  # on several devices each policy has its own copy, and the arena is the host's
        place: dict[str, Any] = {"device": places[0]} if len(places) == 1 else {}
        with self.reasons():
            self._scheme.init_on_sender(
                "policy",
                pipes=[member.weights for member in members],
                procs=[member.process for member in members],
                model=policy,
                **place,
            )
            self.sender = self._scheme.get_sender()
            self.sender.send(timeout=self._options.start_timeout)
        for member in members:
            member.tell(LAYOUT)
        leaves, count = _agreed(self._answers(LAYOUT, deadline, self.members))
        steps = self._options.steps(count)
        # A worker's environments are numbered after those of the workers before it, and seeded so: the same seed gives
        # the same frames, however they are made.
        base = self._specs[0].seed
        self._specs = [
            replace(spec, rows=(spec.index * count, (spec.index + 1) * count), seed=base + spec.index * count)
            for spec in self._specs
        ]
        self.memory, self._fd = buffers.create(leaves, count * len(self._specs), steps)
        for spec in self._specs:
            self._join(spec)

    def restart(self, index: int) -> None:
        """Start a worker again; it joins at the newest version, and does again what it had not delivered."""
        deadline = time.monotonic() + self._options.start_timeout
        self.restarts += 1
        self.members[index].log_loss()
        _log.warning("collector worker %d was lost, and is started again", index)
        # Another stretch of the same seed would repeat the frames that the dead one has delivered already.
        spec = replace(self._specs[index], seed=self._specs[index].seed + 7919 * self.restarts)
        member = self._start_process(spec)
        self._answers(HELLO, deadline, [index])
        with self.reasons():
            self.sender.register_worker(index, member.weights, member.process)
            resend = getattr(self.sender, "resend", None)  # not in schemes without pipes
            if resend is not None:
                resend(index, timeout=self._options.start_timeout)
        self._join(spec)

    def finish_restarts(self) -> None:
        """Do what an interrupted call has left half done."""
        for index in [index for index, member in self.members.items() if not member.joined]:
            self.restart(index)

    def rows(self, index: int) -> slice:
        """A worker's rows of a batch."""
        return slice(*self._specs[index].rows)

    @contextmanager
    def reasons(self, *, restarts: bool = False) -> Iterator[None]:
        """Raise what ended a worker in place of a send's WorkerDied; `restarts`: not if it can start again."""
        try:
            yield
        except WorkerDied as error:
            for index in error.missing:
                member: Any = self.members.get(index) if isinstance(index, int) else None
                if member is None:
                    continue
                self.read(member)
                if member.failure is not None and not (restarts and member.delivered):
                    member.raise_loss()
            raise

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
            wait_for_any(waiting, deadline)
            for member in waiting.values():
                self.read(member)
        return None

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
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            self._scheme.shutdown()

    def _start_process(self, spec: WorkerSpec) -> Member:
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

    def _join(self, spec: WorkerSpec) -> None:
        member = self.members[spec.index]
        member.tell(START, (self.memory.spec, spec.rows, spec.seed))
        for buffer in member.orders:  # those of the worker before it
            member.tell(COLLECT, buffer)
        member.joined = True

    def _answers(self, word: str, deadline: float, workers: Iterable[int]) -> dict[int, Any]:
        """Wait until each of these workers has sent this word. Returns the content of each.

        Raises WorkerDied, AckTimeout, or what a worker failed with.
        """
        asked = list(workers)
        lost = self.wait(lambda: all(word in self.members[index].answers for index in asked), deadline, asked)
        if lost is not None:
            lost.raise_loss()
        return {index: self.members[index].answers[word] for index in asked}


def _agreed(layouts: dict[int, tuple[buffers.Leaves, int]]) -> tuple[buffers.Leaves, int]:
    """The layout and the number of environments that all workers have. Raises ValueError when they differ."""
    first, count = layouts[0]
    for index, (layout, environments) in layouts.items():
        if layout != first:
            different = sorted(".".join(key) for key in {k for k, _ in layout.items() ^ first.items()})
            raise ValueError(
                f"workers 0 and {index} have frames of different form ({', '.join(different)}); all environments of a "
                "collector need the same spaces"
            )
        if environments != count:
            raise DataMismatch(
                f"worker 0 has {count} environment(s) but worker {index} has {environments}; each needs the same "
                "number, also inside of vector environments"
            )
    return first, count
