"""A collector process: it steps its environments when told, and applies new weights between two steps."""

from __future__ import annotations

import contextlib
import random
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch

from ..engine.outcome import Failure
from ..errors import WriterDied
from ..memory.process import dead_parent
from ..memory.system import poll
from ..schemes import WeightSyncScheme
from .buffers import Buffers, BufferSpec
from .rollout import Rollout

# The words of the trainer, then those of the worker. A message is (word, content).
START, COLLECT, STATE, LOAD, STOP = "start", "collect", "state", "load", "stop"
HELLO, LAYOUT, BATCH, ERROR = "hello", "layout", "batch", "error"


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is started with."""

    index: int
    makers: bytes  # a list of functions that make an environment, by cloudpickle
    policy: bytes
    scheme: WeightSyncScheme
    seed: int
    rows: tuple[int, int]  # first and end: its rows of a batch


def run(spec: WorkerSpec, weights: Connection, control: Connection) -> None:
    """Run a worker, until the trainer says STOP or is gone."""
    torch.set_num_threads(1)
    try:
        with contextlib.suppress(EOFError, WriterDied, BrokenPipeError, KeyboardInterrupt):  # the trainer is gone
            _serve(spec, weights, control)
    except Exception as error:
        with contextlib.suppress(OSError):
            control.send((ERROR, Failure.of(error)))
        raise SystemExit(1) from None


def _serve(spec: WorkerSpec, weights: Connection, control: Connection) -> None:
    random.seed(spec.seed)
    np.random.seed(spec.seed % 2**32)
    torch.manual_seed(spec.seed)
    policy = cloudpickle.loads(spec.policy)
    envs = [make() for make in cloudpickle.loads(spec.makers)]
    try:
        scheme = spec.scheme
        scheme.init_on_worker("policy", pipe=weights, model=policy, worker_idx=spec.index)
        _Worker(spec, policy, envs, weights, control).serve()
        scheme.get_receiver().close()
    finally:
        for env in envs:
            env.close()


class _Worker:
    def __init__(
        self, spec: WorkerSpec, policy: Any, envs: list[Any], weights: Connection, control: Connection
    ) -> None:
        self._receiver = receiver = spec.scheme.get_receiver()
        self._spec = spec
        self._control = control
        self._rollout = Rollout(envs, policy, lambda: receiver.version, worker=spec.index)
        self._weights_fd = weights.fileno()
        self._control_fd = control.fileno()
        self._poll = select.poll()
        self._poll.register(self._weights_fd, select.POLLIN)
        self._poll.register(self._control_fd, select.POLLIN)
        self._commands: deque[tuple[str, Any]] = deque()

    def serve(self) -> None:
        """Do what the trainer says, until it says stop."""
        self._control.send((HELLO, None))
        do: dict[str, Callable[[Any], None]] = {
            START: self._start,
            LAYOUT: self._layout,
            COLLECT: self._collect,
            STATE: self._state,
            LOAD: self._load,
        }
        while True:
            word, content = self._next()
            if word == STOP:
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

    def _layout(self, _: Any) -> None:
        self._rollout.reset(self._spec.seed)
        self._control.send((LAYOUT, self._rollout.layout()))

    def _start(self, memory: BufferSpec) -> None:
        self._rollout.use(Buffers(memory), slice(*self._spec.rows))
        torch.manual_seed(self._spec.seed)
        self._rollout.reset(self._spec.seed)
        for i, env in enumerate(self._rollout.envs):
            env.action_space.seed(self._spec.seed + i)

    def _collect(self, buffer: int) -> None:
        if self._rollout.collect(buffer, self._between):
            self._control.send((BATCH, buffer))

    def _between(self) -> bool:
        """Apply new weights between two steps, when no forward runs. False: the trainer has said STOP."""
        return not self._look(0) or not any(word == STOP for word, _ in self._commands)

    def _state(self, _: Any) -> None:
        generators = [env.unwrapped.np_random.bit_generator.state for env in self._rollout.envs]
        # Bytes: a tensor would go through a pipe as shared memory, with a thread to serve it.
        torch_state = torch.get_rng_state().numpy().tobytes()
        state = {"torch": torch_state, "numpy": np.random.get_state(), "python": random.getstate()}
        self._control.send((STATE, {**state, "environments": generators}))

    def _load(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        for env, generator in zip(self._rollout.envs, state["environments"], strict=True):
            env.unwrapped.np_random.bit_generator.state = generator
        self._rollout.reset()
        self._control.send((STATE, None))
