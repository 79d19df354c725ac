"""An actor process: bind a policy to the arena, then act and report until the learner is gone."""

from __future__ import annotations

import math
import os
import signal
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import shmsync

from .envs import CartPoles
from .policy import ActorCritic
from .rollout import ENVIRONMENTS, STEPS, Message, Rollout


class Job(NamedTuple):
    """Everything an actor process is started with."""

    worker: int
    handle: Any  # shmsync's picklable handle of the arena
    consistency: str
    one_version_per_rollout: bool
    seed: int
    rollouts: list[Rollout]  # in shared memory
    pipe: Connection


class Reader:
    """Forward passes under read sections, each with the version of the weights that made it."""

    def __init__(self, sub: shmsync.Subscriber, optimistic: bool) -> None:
        self.sub = sub
        self.policy = sub.bind(ActorCritic())
        self.optimistic = optimistic
        self.torn = 0  # sections whose result was used although it was torn

    def __call__(self, observation: Tensor) -> tuple[Tensor, int]:
        """Log-probabilities `[B, 2]` for observations `[B, 4]`, and their version."""
        if self.optimistic:
            # Reads without holding the learner up, and repeats what turns out torn. So nothing with a
            # consequence belongs inside: drawing an action, for one, happens after.
            return self.sub.run(self.policy, observation, with_version=True)
        with self.sub.read() as section:
            result = self.policy(observation), section.version
        self.torn += section.torn
        return result


def collect(reader: Reader, envs: CartPoles, rollout: Rollout, draw: np.random.Generator) -> None:
    """Fill `rollout` with STEPS steps of every environment."""
    for t in range(STEPS):
        observation = torch.from_numpy(envs.observation)
        rollout.observation[t] = observation
        log_probs, version = reader(observation)
        # The largest of log-probability + Gumbel noise is a draw from the distribution.
        action = np.argmax(log_probs.numpy() + draw.gumbel(size=log_probs.shape), axis=-1)
        step = envs.step(action)
        rollout.next_observation[t] = torch.from_numpy(step.next_observation)
        rollout.action[t] = torch.from_numpy(action)
        rollout.log_prob[t] = log_probs[torch.arange(len(action)), rollout.action[t]]
        rollout.reward[t] = torch.from_numpy(step.reward)
        rollout.terminated[t] = torch.from_numpy(step.terminated)
        rollout.done[t] = torch.from_numpy(step.done)
        rollout.version[t] = version


def act(job: Job, sub: shmsync.Subscriber) -> None:
    """Collect and announce rollouts until the learner closes its end: then EOFError or OSError comes."""
    envs = CartPoles(ENVIRONMENTS, job.seed)
    draw = np.random.default_rng(job.seed)
    reader = Reader(sub, optimistic=job.consistency == "optimistic")
    free = list(range(len(job.rollouts)))
    while True:
        while not free or job.pipe.poll():
            while not job.pipe.poll(0.01):
                sub.refresh()  # even an idle actor moves on and acks, so the learner never waits for it
            free.append(job.pipe.recv())
        buffer = free.pop(0)
        # Sections nest: the forward passes in this one all see its version.
        with sub.read() if job.one_version_per_rollout else nullcontext():
            collect(reader, envs, job.rollouts[buffer], draw)
        job.pipe.send(Message(buffer, envs.take_finished(), sub.stats(), reader.torn))


@torch.no_grad()
def main(job: Job) -> None:
    """Entry point of the process. Ends quietly when the learner is gone."""
    # Ctrl-C reaches every process of the terminal. The learner decides; actors follow its pipe. We
    # were started with both signals blocked, so that none could land before this line.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    torch.set_num_threads(1)  # one core's worth of work: more threads would only get in each other's way
    try:
        # No deadline: after Ctrl-Z and `fg` any would have passed. A dead learner is noticed all the same.
        sub = shmsync.Subscriber(job.handle, consistency=job.consistency, worker=job.worker, timeout=math.inf)
        with sub:
            act(job, sub)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except shmsync.ShmSyncError:
        if not _closed(job.pipe):
            raise  # the learner is there, so this is not about its end
    # The subscriber is closed and nothing else is ours. Taking torch down module by module costs half a second of
    # processor time in each actor, and Ctrl-C waits for all of them.
    os._exit(0)


def _closed(pipe: Connection) -> bool:
    """Whether the learner has closed its end, or is dead."""
    try:
        while pipe.poll():
            pipe.recv()
    except (EOFError, OSError):
        return True
    return False
