"""Timeouts, deadlines and durations; and the arguments that publishers and subscribers share, checked."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from numbers import Integral, Real  # numpy's numbers are among them

from .. import _native


def check_timeout(timeout: float) -> float:
    """Seconds, 0 or more; math.inf waits for ever."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or math.isnan(timeout) or timeout < 0:
        raise ValueError(f"timeout must be 0 or more seconds (math.inf waits for ever), not {timeout!r}")
    return float(timeout)


def check_version(version: int) -> int:
    """Versions count from 1."""
    if isinstance(version, bool) or not isinstance(version, Integral) or not 0 <= version <= _native.MAX_VERSION:
        raise ValueError(f"a version is a whole number, 0 or more, not {version!r}")
    return int(version)


def check_worker(worker: int) -> int:
    """The index by which a publisher names a subscriber."""
    if isinstance(worker, bool) or not isinstance(worker, Integral) or not 0 <= worker < 1 << 31:
        raise ValueError(f"worker is an index from 0 to 2**31 - 1, not {worker!r}")
    return int(worker)


def slice_until(deadline: float) -> int:
    """How long to wait natively, in ns, before looking round for dead partners again: at most 50 ms."""
    return int(max(0.0, min(deadline - time.monotonic(), 0.05)) * 1e9)


def deadline_after(timeout: float | None, default: float) -> float:
    """The moment, on the monotonic clock, at which a call that starts now has to give up."""
    return time.monotonic() + (default if timeout is None else check_timeout(timeout))


_KEPT = 4096  # samples per distribution


@dataclass(frozen=True)
class Latency:
    """A distribution of durations in seconds. `count`, `total` and `max` cover the whole life, the percentiles the
    last 4,096 samples; all are 0 while there is none."""

    count: int
    total: float
    p50: float
    p90: float
    p99: float
    max: float


class Samples:
    """Collects durations; adding one costs an append."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._count = 0
        self._total = 0.0
        self._max = 0.0

    def add(self, seconds: float) -> None:
        """Record one duration."""
        self._recent.append(seconds)
        self._count += 1
        self._total += seconds
        if seconds > self._max:
            self._max = seconds

    def latency(self) -> Latency:
        """The distribution so far."""
        ordered = sorted(self._recent) or [0.0]

        def percentile(fraction: float) -> float:
            return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

        return Latency(self._count, self._total, percentile(0.5), percentile(0.9), percentile(0.99), self._max)
