"""A collector process: it steps its environments when told, and applies new weights between two steps."""

from __future__ import annotations

import multiprocessing
import os
import select
from collections import deque
from contextlib import ExitStack
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


def run(
    closing: ExitStack, control: Connection, weights: Connection, index: int,
    makers: bytes, policy: bytes, scheme: WeightSyncScheme, device: str | None,
) -> None:  # fmt: skip
    """The body of worker `index`: serve until the trainer says STOP or is gone; then close the environments.

    Args:
        closing: closes what was made, also when the next step fails.
        control, weights: the pipes.
        makers: a list of functions that make an environment, by cloudpickle.
        policy: by pack().
        scheme: the trainer's.
        device: where the policy computes; None: where it is.
    """
    # This process is fresh from the fork server, so it may fork as that does. Another server would import everything
    # again for each environment that is a process, as those of AsyncVectorEnv are.
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=weights.close)  # or the trainer would not see its end while a child lives
    module = cloudpickle.loads(policy)
    if device is not None:
        bring(module, device)
    envs = []
    for make in cloudpickle.loads(makers):
        envs.append(make())
        closing.callback(envs[-1].close)
    scheme.init_on_worker("policy", pipe=weights, model=module, worker_idx=index)
    receiver = scheme.get_receiver()
    rollout = Rollout(envs, module, lambda: receiver.version, index, device)
    arriving = select.poll()
    arriving.register(weights, select.POLLIN)
    arriving.register(control, select.POLLIN)
    commands: deque[tuple[str, Any]] = deque()

    def look(milliseconds: float) -> None:
        """Apply weights and queue commands that arrive within that time."""
        for fd, _ in poll(arriving, milliseconds):
            if fd == weights.fileno():
                receiver.receive(0.0)
            else:
                commands.append(control.recv())

    def between() -> bool:
        """Apply new weights between two steps, when no forward runs. False: the trainer has said STOP."""
        look(0)
        return not any(word == STOP for word, _ in commands)

    while True:
        while not commands:
            look(1000)
            if dead_parent() is not None:  # with fork its pipes do not end: siblings hold their other ends
                return
        word, content = commands.popleft()
        if word == LAYOUT:
            rollout.reset(content)
            control.send((LAYOUT, (rollout.layout(), rollout.count)))
        elif word == START:
            attached(control)  # it has had its first weights
            memory, rows, seed = content
            rollout.use(memory, rows)
            torch.manual_seed(seed)
            rollout.reset(seed)
        elif word == COLLECT:
            if rollout.collect(content, between):
                control.send((BATCH, content))
        else:
            receiver.close()
            return
