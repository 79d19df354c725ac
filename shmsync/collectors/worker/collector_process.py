"""A collector process: it steps its environments when told, and applies new weights between two steps."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from ...memory.system.calls import poll
from ...memory.system.process import dead_parent
from ...workers.rank_process import report, seed_generators
from ..buffers import Buffers, BufferSpec
from ..options import WorkerSpec
from ..policy_packing import bring
from . import rng_state as saved
from .rollout import Rollout
from .threads import EnvInThread

# The words of the trainer, then those of the worker. A message is (word, content).
START, COLLECT, LAYOUT, STATE, LOAD, STOP = "start", "collect", "layout", "state", "load", "stop"
HELLO, BATCH, ERROR, CLOSED = "hello", "batch", "error", "closed"  # and LAYOUT, STATE, LOAD: (number, answer)

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def run(spec: WorkerSpec, weights: Connection, control: Connection) -> None:
    """Run a worker, until the trainer says STOP or is gone. Whatever ends it otherwise is sent to the trainer."""
    # Ctrl-C in a terminal reaches every process of the group. What follows from it is the trainer's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _allow_processes(weights, control)
    torch.set_num_threads(1)
    envs: list[Any] = []
    failed = False
    try:
        _Worker(spec, weights, control, envs).serve()
    except BaseException as error:  # of the environments, the policy, or because the trainer is gone
        failed = True
        report(control, ERROR, error)
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            if not failed:
                report(control, CLOSED, error)
            failed = True
    if failed:
        raise SystemExit(1)


def _allow_processes(*pipes: Connection) -> None:
    """Let environments have processes of their own, as those of AsyncVectorEnv do."""
    multiprocessing.current_process().daemon = False  # a daemon may not have any
    # This process has one thread and is fresh from the fork server, so it may fork as that does. Another server would
    # import everything again for each environment.
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)

    prctl = ctypes.CDLL(None).prctl
    forks_in_main = False

    def look() -> None:
        nonlocal forks_in_main
        forks_in_main = threading.get_native_id() == os.getpid()

    def leave() -> None:
        for pipe in pipes:
            pipe.close()  # or the trainer would not see their end while a child of a dead worker lives
        if forks_in_main:  # the kernel kills it when the thread ends that has forked it
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # one that is busy would not notice that its worker has died

    os.register_at_fork(before=look, after_in_child=leave)


class _Worker:
    """A worker with its environments, which are added to `envs` one by one, so that those that were made are closed."""

    def __init__(self, spec: WorkerSpec, weights: Connection, control: Connection, envs: list[Any]) -> None:
        seed_generators(spec.seed)
        policy = cloudpickle.loads(spec.policy)
        if spec.device is not None:
            bring(policy, spec.device)
        for make in cloudpickle.loads(spec.makers):
            envs.append(EnvInThread(make) if spec.options.envs_in_threads else make())
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
        self._obeyed = 0  # the serial of the newest order

    def serve(self) -> None:
        """Do what the trainer says, until it says stop. Then leave the scheme."""
        self._control.send((HELLO, (0, None)))
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

    def _layout(self, number_and_nothing: tuple[int, None]) -> None:
        self._rollout.reset(self._spec.seed)
        self._control.send((LAYOUT, (number_and_nothing[0], (self._rollout.layout(), self._rollout.count))))

    def _start(self, place: tuple[BufferSpec, tuple[int, int], int]) -> None:
        memory, rows, seed = place
        self._rollout.use(Buffers(memory), slice(*rows))
        torch.manual_seed(seed)
        self._rollout.reset(seed)
        self._rollout.seed_actions(seed)

    def _collect(self, order: tuple[int, int]) -> None:
        buffer, serial = order
        if serial <= self._obeyed:  # the trainer was interrupted, and said it once more
            return
        self._obeyed = serial
        if self._rollout.collect(buffer, self._between):
            self._control.send((BATCH, order))

    def _between(self) -> bool:
        """Apply new weights between two steps, when no forward runs. False: the trainer has said STOP or LOAD."""
        if not self._look(0) and not self._commands:
            return True
        words = [word for word, _ in self._commands]
        # A trainer that was interrupted in its wait for this batch saves the state now, not when the batch is done.
        if STATE in words and LOAD not in words[: words.index(STATE)]:
            _, content = self._commands[words.index(STATE)]
            del self._commands[words.index(STATE)]
            self._state(content)
        return STOP not in words and LOAD not in words  # what was ordered before a LOAD counts for nothing

    def _state(self, number_and_nothing: tuple[int, None]) -> None:
        self._control.send((STATE, (number_and_nothing[0], saved.generators(self._rollout.envs))))

    def _load(self, number_and_state: tuple[int, dict[str, Any]]) -> None:
        number, state = number_and_state
        saved.restore(state, self._rollout.envs)
        self._rollout.reset()
        self._control.send((LOAD, (number, None)))
