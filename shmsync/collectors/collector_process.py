"""A collector process: it steps its environments when told, and applies new weights between two steps."""

from __future__ import annotations

import multiprocessing
import os
import select
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from ..memory.process import dead_parent, poll
from ..workers.worker_process import Reported, report
from .buffers import Buffers, BufferSpec
from .options import WorkerSpec
from .policy_packing import bring
from .rollout import Rollout

# The words of the trainer, then those of the worker. A message is (word, content).
LAYOUT, START, COLLECT, STOP = "layout", "start", "collect", "stop"
HELLO, BATCH = "hello", "batch"  # and LAYOUT


def run(control: Connection, weights: Connection, spec: WorkerSpec) -> None:
    """The body of a worker: serve until the trainer says STOP or is gone. What ends it otherwise is reported."""
    # This process is fresh from the fork server, so it may fork as that does. Another server would import everything
    # again for each environment that is a process, as those of AsyncVectorEnv are.
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=weights.close)  # or the trainer would not see its end while a child lives
    envs: list[Any] = []
    failed = False
    try:
        _Worker(spec, weights, control, envs).serve()
    except BaseException as error:  # of the environments, the policy, or because the trainer is gone
        failed = True
        report(control, error)
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            if not failed:
                report(control, error)
            failed = True
    if failed:
        raise Reported


class _Worker:
    """A worker with its environments, which are added to `envs` one by one, so that those that were made are closed."""

    def __init__(self, spec: WorkerSpec, weights: Connection, control: Connection, envs: list[Any]) -> None:
        policy = cloudpickle.loads(spec.policy)
        if spec.device is not None:
            bring(policy, spec.device)
        for make in cloudpickle.loads(spec.makers):
            envs.append(make())
        spec.scheme.init_on_worker("policy", pipe=weights, model=policy, worker_idx=spec.index)
        self._receiver = receiver = spec.scheme.get_receiver()
        self._spec = spec
        self._control = control
        self._rollout = Rollout(envs, policy, lambda: receiver.version, spec)
        self._weights_fd = weights.fileno()
        self._poll = select.poll()
        self._poll.register(weights, select.POLLIN)
        self._poll.register(control, select.POLLIN)
        self._commands: deque[tuple[str, Any]] = deque()

    def serve(self) -> None:
        """Do what the trainer says, until it says stop. Then leave the scheme."""
        self._control.send((HELLO, None))
        do: dict[str, Callable[[Any], None]] = {LAYOUT: self._layout, START: self._start, COLLECT: self._collect}
        while True:
            word, content = self._next()
            if word == STOP:
                self._receiver.close()
                return
            do[word](content)

    def _next(self) -> tuple[str, Any]:
        """The next command; weights are applied meanwhile."""
        while not self._commands:
            if not self._look(1000) and dead_parent() is not None:
                raise EOFError
        return self._commands.popleft()

    def _look(self, milliseconds: int) -> bool:
        """Apply weights and queue commands that arrive within that time. Has anything arrived?"""
        ready = poll(self._poll, milliseconds)
        for fd, _ in ready:
            if fd == self._weights_fd:
                self._receiver.receive(0.0)
            else:
                self._commands.append(self._control.recv())
        return bool(ready)

    def _layout(self, _: None) -> None:
        self._rollout.reset(self._spec.seed)
        self._control.send((LAYOUT, (self._rollout.layout(), self._rollout.count)))

    def _start(self, place: tuple[BufferSpec, tuple[int, int], int]) -> None:
        memory, rows, seed = place
        self._rollout.use(Buffers(memory), slice(*rows))
        torch.manual_seed(seed)
        self._rollout.reset(seed)
        self._rollout.seed_actions(seed)

    def _collect(self, buffer: int) -> None:
        if self._rollout.collect(buffer, self._between):
            self._control.send((BATCH, buffer))

    def _between(self) -> bool:
        """Apply new weights between two steps, when no forward runs. False: the trainer has said STOP."""
        self._look(0)
        return not any(word == STOP for word, _ in self._commands)
