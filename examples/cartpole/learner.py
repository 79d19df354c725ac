"""The learner: takes whatever rollouts are ready, and turns each optimiser step into a version."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import torch

import shmsync

from .figures import Figures
from .fleet import Fleet
from .options import Options
from .policy import ActorCritic
from .ppo import Settings, losses
from .rollout import Rollout
from .stop import Stop

TIMEOUT = 0.3  # seconds; short, so that an actor stopped in mid-read does not keep Ctrl-C waiting
WATCH = 0.1  # seconds from one version whose acks are watched to the next


class Outcome(Enum):
    """Why training ended."""

    REACHED = "the target was reached"
    LIMIT = "the step limit was reached first"
    ALONE = "no actor is left"
    STOPPED = "stopped by a signal"


class Learner:
    """A model, its optimiser and the arena that carries it."""

    def __init__(self, options: Options, figures: Figures) -> None:
        self.figures = figures
        self.settings = Settings()
        self.model = ActorCritic()
        # Fused: a step is one pass over the weights, so actors wait at the door for a third of the time.
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.settings.learning_rate, eps=1e-5, fused=True)
        self.pub = shmsync.Publisher(self.model, slots=options.slots, max_readers=options.workers, timeout=TIMEOUT)
        self.in_place = options.slots == 1
        if self.in_place:
            # From here on the parameters are the arena: `optimizer.step()` writes the next version where
            # the actors will read it, and nothing is ever copied.
            self.pub.adopt(self.model, self.optimizer)
        self._watched: int | None = None  # a version whose acks are being watched
        self._watched_last = 0.0  # when that began

    def learn(self, rollout: Rollout, stop: Stop, tick: Callable[[], None]) -> None:
        """Several optimiser steps on one batch of rollouts, each published as it is made."""
        for loss in losses(self.model, rollout, self.settings):
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
            self._step(stop)
            self.figures.learner_steps += 1
            self._watch_acks()
            tick()
            if stop:
                return

    def _step(self, stop: Stop) -> None:
        """One optimiser step, and with it one version."""
        if not self.in_place:
            self.optimizer.step()
        while not stop:
            begin = time.perf_counter()
            try:
                if self.in_place:
                    self.optimizer.step()
                else:
                    self.pub.publish()
                return
            except shmsync.ReaderStalled:  # an actor has held its version all this time; nothing was written
                self.figures.stalled += time.perf_counter() - begin

    def _watch_acks(self) -> None:
        """Time, for one version after the other, how long until every living actor uses it or a newer one.

        Looked up between steps instead of waited for, so the figure is good to one optimiser step.
        """
        now = time.perf_counter()
        if self._watched is None:
            if now - self._watched_last >= WATCH:
                self._watched, self._watched_last = self.pub.version, now
        elif min((r.acked for r in self.pub.readers() if r.state != "dead"), default=0) >= self._watched:
            self.figures.acks.append(now - self._watched_last)
            self._watched = None


def train(learner: Learner, fleet: Fleet, options: Options, stop: Stop, tick: Callable[[], None]) -> Outcome:
    """Learn until the target is reached, the steps are used up, the actors are gone, or `stop` is set.

    `tick()` is called after every optimiser step and at least ten times a second.
    """
    figures = learner.figures
    while not stop:
        full = fleet.hear(timeout=0.1)
        for _, rollout, message in full:
            figures.hear(rollout, message, learner.pub.version)
        mean = figures.mean_return
        if mean is not None and mean >= options.target:
            return Outcome.REACHED
        if figures.env_steps >= options.max_steps:
            return Outcome.LIMIT
        if not fleet.actors:
            return Outcome.ALONE
        if full:
            batch = Rollout.joined([rollout for _, rollout, _ in full])
            fleet.release(full)  # copied: the actors may go on while we learn
            learner.learn(batch, stop, tick)
        tick()
    return Outcome.STOPPED
