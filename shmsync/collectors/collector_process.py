"""A collector process: it steps its environments when told, and applies new weights between two steps."""

from __future__ import annotations

import multiprocessing
import os
import select
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from ..memory.process import dead_parent, poll
from ..schemes import WeightSyncScheme
from ..workers.worker_process import attached
from .policy import bring
from .rollout import Rollout

# The words of the trainer, then those of the worker. A message is (word, content).
LAYOUT, START, COLLECT, STOP = "layout", "start", "collect", "stop"
BATCH = "batch"  # and LAYOUT


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is started with."""

    index: int
    makers: bytes  # a list of functions that make an environment, by cloudpickle
    policy: bytes
    scheme: WeightSyncScheme
    device: str | None  # where the policy computes; None: where it is


def run(closing: ExitStack, control: Connection, weights: Connection, spec: WorkerSpec) -> None:
    """The body of a worker: serve until the trainer says STOP or is gone; then close the environments."""
    # This process is fresh from the fork server, so it may fork as that does. Another server would import everything
    # again for each environment that is a process, as those of AsyncVectorEnv are.
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=weights.close)  # or the trainer would not see its end while a child lives
    _Worker(spec, weights, control, closing).serve()


class _Worker:
    """A worker and its environments. `closing` closes those that were made, also when the next one fails."""

    def __init__(self, spec: WorkerSpec, weights: Connection, control: Connection, closing: ExitStack) -> None:
        policy = cloudpickle.loads(spec.policy)
        if spec.device is not None:
            bring(policy, spec.device)
        envs = []
        for make in cloudpickle.loads(spec.makers):
            envs.append(make())
            closing.callback(envs[-1].close)
        spec.scheme.init_on_worker("policy", pipe=weights, model=policy, worker_idx=spec.index)
        self._receiver = receiver = spec.scheme.get_receiver()
        self._control = control
        self._rollout = Rollout(envs, policy, lambda: receiver.version, spec.index, spec.device)
        self._weights_fd = weights.fileno()
        self._poll = select.poll()
        self._poll.register(weights, select.POLLIN)
        self._poll.register(control, select.POLLIN)
        self._commands: deque[tuple[str, Any]] = deque()

    def serve(self) -> None:
        """Do what the trainer says, until it says stop. Then leave the scheme."""
        while True:
            while not self._commands:
                if not self._look(1000) and dead_parent() is not None:
                    return
            word, content = self._commands.popleft()
            if word == LAYOUT:
                self._rollout.reset(content)
                self._control.send((LAYOUT, (self._rollout.layout(), self._rollout.count)))
            elif word == START:
                attached(self._control)  # it has had its first weights
                memory, rows, seed = content
                self._rollout.use(memory, rows)
                torch.manual_seed(seed)
                self._rollout.reset(seed)
            elif word == COLLECT:
                if self._rollout.collect(content, self._between):
                    self._control.send((BATCH, content))
            else:
                self._receiver.close()
                return

    def _look(self, milliseconds: int) -> bool:
        """Apply weights and queue commands that arrive within that time. Has anything arrived?"""
        ready = poll(self._poll, milliseconds)
        for fd, _ in ready:
            if fd == self._weights_fd:
                self._receiver.receive(0.0)
            else:
                self._commands.append(self._control.recv())
        return bool(ready)

    def _between(self) -> bool:
        """Apply new weights between two steps, when no forward runs. False: the trainer has said STOP."""
        self._look(0)
        return not any(word == STOP for word, _ in self._commands)
