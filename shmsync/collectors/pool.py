"""The collector's workers as the trainer sees them: started, read from, started again after a death, ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from tensordict import TensorDict
from torch import nn

from ..errors import AckTimeout, DataMismatch, WorkerDied
from ..schemes import WeightSyncScheme
from ..schemes.devices import WorkerDevices
from ..workers.process import Process, end, leave, wait_for_any
from . import buffers
from .collector_process import BATCH, COLLECT, LAYOUT, START, STOP, WorkerSpec, run

PRELOADED = ["torch", "tensordict", "gymnasium", "cloudpickle", "shmsync.collectors"]
OnLag = Literal["warn", "drop"]
_STOPPING = 5.0  # seconds, for environments to close

_log = logging.getLogger("shmsync")


@dataclass(frozen=True)
class CollectorOptions:
    """What a collector is given, checked."""

    num_workers: int
    frames_per_batch: int
    total_frames: int
    max_lag: float  # math.inf: any number of versions
    on_lag: OnLag
    sync: bool
    restart_workers: bool
    timeout: float
    start_timeout: float

    def steps(self, environments: int) -> int:
        """How many steps of each environment are in a batch, where a worker has so many of them.

        Raises ValueError where the frames of a batch do not divide evenly.
        """
        share = environments * (self.num_workers if self.sync else 1)
        if self.frames_per_batch % share:
            raise ValueError(
                f"frames_per_batch={self.frames_per_batch} does not divide evenly over the {share} environment(s) of a "
                f"batch; use {max(1, round(self.frames_per_batch / share)) * share}"
            )
        return self.frames_per_batch // share


class Member(Process):
    """One worker process; besides its pipe for messages it has one for weights."""

    def __init__(self, context: Any, spec: WorkerSpec) -> None:
        self.index = spec.index
        self.joined = False  # it has its weights and knows its buffers
        self.delivered = False  # a batch since it was started
        self.orders: list[int] = []  # the buffers that it has to fill
        self.layout: tuple[buffers.Leaves, int] | None = None  # of a frame, and the number of its environments
        self.weights, weights_there = context.Pipe()
        try:
            super().__init__(context, f"collector {spec.index}", run, (weights_there, spec), seed=spec.seed)
        finally:
            weights_there.close()

    def raise_loss(self) -> None:
        """Raise what it failed with, as an exception that may end a loop or a program, or WorkerDied."""
        if self.failure is None:
            raise WorkerDied(
                f"collector worker {self.index} died ({self.how}). Its unfinished frames are lost; "
                "restart_workers=True restarts such a worker",
                missing=[self.index],
            )
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

    def order(self, buffer: int) -> None:
        """Let it fill this buffer."""
        self.orders.append(buffer)
        self.send(COLLECT, buffer)

    def close(self) -> None:
        """As Process.close(); closes its pipe for weights too."""
        super().close()
        self.weights.close()


class WorkerPool:
    """All workers, by index, and their batches. A call that a Ctrl-C has ended may be made again."""

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
        self.restarts = self.dropped = 0
        self._specs = specs
        self._scheme = scheme
        self._options = options
        self._devices = devices
        self._buffer = 0  # of the next batch, in sync mode
        self._handed: tuple[int, int] | None = None  # (worker, buffer) that the trainer has, without sync
        self._fd = -1  # of the buffers
        self._pid = os.getpid()

    # ---- their life

    def start(self, policy: nn.Module) -> None:
        """Start all workers, send them their first weights, and give them their rows of the batches."""
        deadline = time.monotonic() + self._options.start_timeout
        members = [self._start_process(spec) for spec in self._specs]
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
            member.send(LAYOUT)
        self._wait(lambda: all(member.layout for member in members), deadline, self.members)
        leaves, count = _agreed([member.layout for member in members])
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
            for buffer in () if self._options.sync else range(buffers.BUFFERS):  # without sync they fill all at once
                self.members[spec.index].order(buffer)

    def restart(self, index: int) -> None:
        """Start a worker again; it joins at the newest version, and does again what it had not delivered."""
        self.restarts += 1
        self.members[index].log_loss()
        _log.warning("collector worker %d was lost, and is started again", index)
        # Another stretch of the same seed would repeat the frames that the dead one has delivered already.
        spec = replace(self._specs[index], seed=self._specs[index].seed + 7919 * self.restarts)
        member = self._start_process(spec)
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

    def end(self) -> None:
        """End the workers, then what they used. Idempotent. A Ctrl-C meanwhile ends the workers at once."""
        if self._pid != os.getpid():  # this is a forked child that ends; the workers are the trainer's
            return
        try:
            leave(self.members, STOP, time.monotonic() + _STOPPING)
        finally:
            end(self.members, 0.0)
            for member in self.members.values():
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
            earlier.close()
        member = Member(self._context, spec)
        if earlier is not None:
            member.orders = earlier.orders
        self.members[spec.index] = member
        return member

    def _join(self, spec: WorkerSpec) -> None:
        member = self.members[spec.index]
        member.send(START, (self.memory.spec, spec.rows, spec.seed))
        for buffer in member.orders:  # those of the worker before it
            member.send(COLLECT, buffer)
        member.joined = True

    # ---- their batches

    def next_batch(self) -> TensorDict:
        """Wait for a batch: with sync one from all workers, else one from whichever is ready.

        Raises AckTimeout, WorkerDied or what a worker failed with.
        """
        while True:
            batch = self._from_all() if self._options.sync else self._from_one()
            lag = self.sender.version - int(batch["policy_version"].min())
            if lag <= self._options.max_lag:
                break
            if self._options.on_lag == "warn":
                warnings.warn(
                    f"frames are {lag} versions old when they are handed out, max_lag is {self._options.max_lag}; "
                    'send weights less often, or use on_lag="drop"',
                    stacklevel=3,
                )
                break
            self.dropped += 1  # it is collected again
        self._buffer = (self._buffer + 1) % buffers.BUFFERS
        return batch

    def begin_round(self) -> None:
        """Order the next batch from all workers that have neither this order yet nor filled it."""
        for index, member in self.members.items():
            if self._buffer not in member.orders and (index, self._buffer) not in self.filled:
                member.order(self._buffer)

    def _from_all(self) -> TensorDict:
        self.begin_round()
        deadline = time.monotonic() + self._options.timeout
        self._wait(lambda: len(self.filled) == len(self.members), deadline, self.members)
        self.filled.clear()
        return self.memory.batch(self._buffer)

    def _from_one(self) -> TensorDict:
        if self._handed is not None:  # the trainer is done with it, or it was too old
            index, buffer = self._handed
            self._handed = None
            self.members[index].order(buffer)
        self._wait(lambda: self.filled, time.monotonic() + self._options.timeout, self.members)
        index, buffer = self._handed = next(iter(self.filled))
        del self.filled[index, buffer]
        return self.memory.batch(buffer, slice(*self._specs[index].rows))

    # ---- what they say

    @contextmanager
    def reasons(self, *, restarts: bool = False) -> Iterator[None]:
        """Raise what ended a worker in place of a send's WorkerDied; `restarts`: not if it can start again."""
        try:
            yield
        except WorkerDied as error:
            for member in [self.members[index] for index in error.missing if index in self.members]:
                self.read(member)
                if member.failure is not None and not (restarts and member.delivered):
                    member.raise_loss()
            raise

    def read(self, member: Member) -> None:
        """Handle what a worker has sent."""
        member.read()
        while member.received:
            word, content = member.received[0]
            del member.received[0]
            if word == BATCH:
                member.delivered = True
                member.orders.remove(content)
                self.filled[member.index, content] = None
            else:
                member.layout = content

    def _wait(self, done: Callable[[], Any], deadline: float, workers: Iterable[int]) -> None:
        """Until done(). Workers that are lost meanwhile are started again, or raise; AckTimeout at the deadline."""
        while True:
            waiting = {index: self.members[index] for index in workers}
            for member in waiting.values():
                self.read(member)
            if done():
                return
            lost = next((member for member in waiting.values() if member.lost), None)
            if lost is not None:
                if not (self._options.restart_workers and lost.delivered):
                    lost.raise_loss()
                self.restart(lost.index)
            elif time.monotonic() >= deadline:
                late = ", ".join(
                    f"worker {index} ({member.peer}{', stopped' if member.peer.stopped else ''})"
                    for index, member in waiting.items()
                )
                raise AckTimeout(
                    f"no batch is ready in time from {late}: an environment may be slow or stuck. Give more time with "
                    "timeout=",
                    missing=list(waiting),
                )
            else:
                wait_for_any(waiting, deadline)


def _agreed(layouts: list[Any]) -> tuple[buffers.Leaves, int]:
    """The layout and the number of environments that all workers have. Raises an error when they differ."""
    first, count = layouts[0]
    for index, (layout, environments) in enumerate(layouts):
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
