"""The collector's workers and what they need: weights, a place in the batches, and a restart after a death."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import DataMismatch, WorkerDied
from ...schemes import WeightSyncScheme
from ...schemes.devices import WorkerDevices
from .. import buffers
from ..collector_process import COLLECT, HELLO, LAYOUT, START
from ..options import CollectorOptions, WorkerSpec
from .worker_pool import WorkerPool

_log = logging.getLogger("shmsync")


@dataclass(eq=False, repr=False)
class WorkerSetup:
    """The workers of one collector. A restart that a Ctrl-C has ended is done again by finish_restarts()."""

    pool: WorkerPool
    scheme: WeightSyncScheme
    specs: list[WorkerSpec]
    options: CollectorOptions
    devices: WorkerDevices
    restarts: int = 0

    def start(self, policy: nn.Module) -> None:
        """Start all workers, send them their first weights, and give them their rows of the batches."""
        deadline = time.monotonic() + self.options.start_timeout
        members = [self.pool.start(spec) for spec in self.specs]
        self.pool.answers(HELLO, deadline, self.pool.members)
        place: dict[str, Any] = {} if self.devices.unset else {"device": self.devices}
        with self.reasons():
            self.scheme.init_on_sender(
                "policy",
                pipes=[member.weights for member in members],
                procs=[member.process for member in members],
                model=policy,
                **place,
            )
            self.sender = self.scheme.get_sender()
            self.sender.send(timeout=self.options.start_timeout)
        for member in members:
            member.tell(LAYOUT)
        leaves, count = _agreed(self.pool.answers(LAYOUT, deadline, self.pool.members))
        steps = self.options.steps(count)
        # A worker's environments are numbered after those of the workers before it, and seeded so: the same seed gives
        # the same frames, however they are made.
        base = self.specs[0].seed
        self.specs = [
            replace(spec, rows=(spec.index * count, (spec.index + 1) * count), seed=base + spec.index * count)
            for spec in self.specs
        ]
        self.memory, self.pool.fd = buffers.create(leaves, count * len(self.specs), steps)
        for spec in self.specs:
            self._join(spec)

    def restart(self, index: int) -> None:
        """Start a worker again; it joins at the newest version, and does again what it had not delivered."""
        deadline = time.monotonic() + self.options.start_timeout
        self.restarts += 1
        self.pool.members[index].log_loss()
        _log.warning("collector worker %d was lost, and is started again", index)
        # Another stretch of the same seed would repeat the frames that the dead one has delivered already.
        spec = replace(self.specs[index], seed=self.specs[index].seed + 7919 * self.restarts)
        member = self.pool.start(spec)
        self.pool.answers(HELLO, deadline, [index])
        with self.reasons():
            self.sender.register_worker(index, member.weights, member.process)
            resend = getattr(self.sender, "resend", None)  # not in schemes without pipes
            if resend is not None:
                resend(index, timeout=self.options.start_timeout)
        self._join(spec)

    def _join(self, spec: WorkerSpec) -> None:
        member = self.pool.members[spec.index]
        member.tell(START, (self.memory.spec, spec.rows, spec.seed))
        for buffer in member.orders:  # those of the worker before it
            member.tell(COLLECT, buffer)
        member.joined = True

    def finish_restarts(self) -> None:
        """Do what an interrupted call has left half done."""
        for index in [index for index, member in self.pool.members.items() if not member.joined]:
            self.restart(index)

    def rows(self, index: int) -> slice:
        """A worker's rows of a batch."""
        return slice(*self.specs[index].rows)

    @contextmanager
    def reasons(self, *, restarts: bool = False) -> Iterator[None]:
        """Raise what ended a worker in place of a send's WorkerDied; `restarts`: not if it can start again."""
        try:
            yield
        except WorkerDied as error:
            for index in error.missing:
                member: Any = self.pool.members.get(index) if isinstance(index, int) else None
                if member is None:
                    continue
                self.pool.read(member)
                if member.failure is not None and not (restarts and member.delivered):
                    member.raise_loss()
            raise


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
