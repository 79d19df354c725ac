"""The collector's processes, as the trainer sees them: started, listened to, restarted, stopped."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
from torch import nn

from ..errors import AckTimeout, WorkerDied
from ..memory.exiting import stay_if_exiting
from ..memory.process import Peer
from .worker import ERROR, STOP, WorkerSpec, run

DIED = "died"
PRELOADED = ["torch", "tensordict", "gymnasium", "cloudpickle", "shmsync.collectors"]


class WorkerProcess:
    """One worker process and its two pipes: one for weights, one for everything else."""

    def __init__(self, context: Any, spec: WorkerSpec) -> None:
        self.index = spec.index
        self.weights, weights_there = context.Pipe()
        self.control, control_there = context.Pipe()
        name = f"shmsync-collector-{spec.index}"
        self.process = context.Process(target=run, args=(spec, weights_there, control_there), name=name, daemon=True)
        self.process.start()
        weights_there.close()
        control_there.close()
        self.delivered = False  # a batch since it was started

    def died(self) -> WorkerDied:
        """The error that says how this worker died."""
        self.process.join(1)
        return WorkerDied(
            f"collector worker {self.index} died ({Peer(process=self.process)}); its unfinished frames are lost. With "
            "restart_workers=True it is started again",
            missing=[self.index],
        )

    def tell(self, word: str, content: Any = None) -> None:
        """Send a command. Does nothing for a dead worker; events() reports its death."""
        try:
            self.control.send((word, content))
        except (BrokenPipeError, ConnectionResetError):
            pass

    def end(self, deadline: float) -> None:
        """Wait until the deadline for the process to stop, then kill it."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.weights.close()
        self.control.close()


class Fleet:
    """All workers, by index."""

    def __init__(self, start_method: str) -> None:
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self.pid = os.getpid()
        self.members: dict[int, WorkerProcess] = {}
        self._unheard: list[tuple[WorkerProcess, str, Any]] = []

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker, in place of an earlier one of its index."""
        earlier = self.members.get(spec.index)
        if earlier is not None:
            earlier.end(0.0)
            self._unheard = [event for event in self._unheard if event[0] is not earlier]
        member = self.members[spec.index] = WorkerProcess(self._context, spec)
        return member

    def tell_all(self, word: str, content: Any = None) -> None:
        """Send a command to every worker."""
        for member in self.members.values():
            member.tell(word, content)

    def events(self, deadline: float, workers: Iterable[int] | None = None) -> Iterator[tuple[WorkerProcess, str, Any]]:
        """Yield (worker, word, content) for each message, without end; ERROR from a failed worker, DIED for a dead one.

        Raises AckTimeout when nothing has come until the deadline.
        """
        members = [member for member in self.members.values() if workers is None or member.index in workers]
        while True:
            for event in [event for event in self._unheard if event[0] in members]:
                self._unheard.remove(event)
                yield event
            sources: dict[Any, WorkerProcess] = {member.control: member for member in members}
            sources |= {member.process.sentinel: member for member in members}
            timeout = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            ready = wait(list(sources), timeout)
            stay_if_exiting()  # what has come is the end of the workers
            if not ready:
                silent = [member.index for member in members]
                raise AckTimeout(
                    f"collector workers {silent} have not answered in time; is an environment slow or stuck? Give them "
                    "more with timeout=",
                    missing=silent,
                )
            for source in ready:
                member = sources[source]
                if isinstance(source, Connection):
                    yield (member, *_heard(member))
                elif not member.control.poll():  # else its last messages come first
                    yield member, DIED, None

    def gather(self, word: str, deadline: float, workers: Iterable[int] | None = None) -> dict[int, Any]:
        """Wait until each of these workers has sent this word. Returns the contents by worker.

        Other messages are kept for events(). Raises WorkerDied, AckTimeout, or what a worker failed with.
        """
        awaited = set(self.members if workers is None else workers)
        said: dict[int, Any] = {}
        others: list[tuple[WorkerProcess, str, Any]] = []
        try:
            for event in self.events(deadline, awaited):
                member, heard, content = event
                if heard in (DIED, ERROR):
                    raise_for(event)
                if heard == word:
                    said[member.index] = content
                else:
                    others.append(event)
                if said.keys() == awaited:
                    break
        finally:
            self._unheard += others
        return said

    def stop(self) -> None:
        """End every worker. Idempotent."""
        self.tell_all(STOP)
        deadline = time.monotonic() + 5.0
        for member in self.members.values():
            member.end(deadline)
        self.members.clear()


def _heard(member: WorkerProcess) -> tuple[str, Any]:
    try:
        return member.control.recv()
    except (EOFError, ConnectionResetError):
        return DIED, None


def raise_for(event: tuple[WorkerProcess, str, Any]) -> None:
    """Raise the exception that an ERROR event brought, or WorkerDied for a DIED event."""
    member, word, content = event
    if word == DIED:
        raise member.died()
    raise content.exception() from RuntimeError(f"collector worker {member.index} failed:\n{content.trace}")


def pack(policy: nn.Module, *, values: bool) -> bytes:
    """Pickle the policy for the workers. Without `values`, its parameters are left to shared memory."""
    if not values:
        memo = {
            id(parameter): nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            for parameter in policy.parameters()
        }
        policy = copy.deepcopy(policy, memo)
    return cloudpickle.dumps(policy)
