"""Everything that is counted during a run, in one place; the dashboard and the report only read it."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

from .rollout import Message, Rollout

EPISODES = 100  # the mean return is taken over as many


@dataclass
class Figures:
    """Counts and series of one run. Series are indexed by environment steps."""

    begin: float = field(default_factory=time.perf_counter)
    first: float = math.inf  # when the first rollout came: until then the actors were starting
    env_steps: int = 0
    learner_steps: int = 0
    stalled: float = 0.0  # seconds of attempts to publish that an actor, by holding its version, made fail
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))
    episodes: list[tuple[int, float]] = field(default_factory=list)  # (environment steps, return)
    lags: list[tuple[int, int, float, int]] = field(default_factory=list)  # (steps, min, mean, max) versions
    publishes: list[tuple[int, float]] = field(default_factory=list)  # (steps, mean seconds since the last)
    acks: list[float] = field(default_factory=list)  # seconds from a version until every actor used it
    _last_rate: tuple[float, int] = (0.0, 0)
    _published: tuple[int, float] = (0, 0.0)
    rate: float = 0.0  # environment steps per second, of late

    def hear(self, rollout: Rollout, message: Message, version: int) -> None:
        """Count one rollout that arrives while the learner is at `version`."""
        if self.env_steps == 0:
            self.first = time.perf_counter()
        self.env_steps += rollout.reward.numel()
        for value in message.returns:
            self.recent.append(value)
            self.episodes.append((self.env_steps, value))
        lag = version - rollout.version
        self.lags.append((self.env_steps, int(lag.min()), float(lag.double().mean()), int(lag.max())))

    def published(self, count: int, total: float) -> None:
        """So many publishes have taken so many seconds: one point of the plot for each rollout that came since."""
        if count > self._published[0]:
            self.publishes.append((self.env_steps, (total - self._published[1]) / (count - self._published[0])))
            self._published = (count, total)

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.begin

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second, counted from the first rollout."""
        return self.env_steps / max(1e-9, time.perf_counter() - self.first)

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last 100 episodes; None before there are as many."""
        return sum(self.recent) / EPISODES if len(self.recent) == EPISODES else None

    @property
    def worst_lag(self) -> int:
        """The most versions any step was behind when the learner took it."""
        return max((most for *_, most in self.lags), default=0)

    def lag(self, rollouts: int = 64) -> tuple[int, float, int]:
        """Versions behind: least, mean and most, over the latest rollouts."""
        latest = self.lags[-rollouts:]
        if not latest:
            return 0, 0.0, 0
        return (
            min(low for _, low, _, _ in latest),
            sum(mean for _, _, mean, _ in latest) / len(latest),
            max(high for *_, high in latest),
        )

    def ack(self, percent: float) -> float:
        """Percentile of `acks` so far, in seconds; 0 before the first."""
        return sorted(self.acks)[int((len(self.acks) - 1) * percent / 100)] if self.acks else 0.0

    def update_rate(self) -> float:
        """Environment steps per second since this was last called a second or more ago."""
        now, (then, steps) = self.seconds, self._last_rate
        if now - then >= 1.0:
            self.rate = (self.env_steps - steps) / (now - then)
            self._last_rate = (now, self.env_steps)
        return self.rate
