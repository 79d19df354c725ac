"""Timeouts, deadlines and durations; and the arguments of constructors, checked."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real  # numpy's numbers are among them
from typing import ParamSpec, SupportsIndex, TypeVar

from .. import _native

P = ParamSpec("P")
T = TypeVar("T")


def names_nearest(call: Callable[P, T]) -> Callable[P, T]:
    """The call, whose TypeError for an unknown keyword names the nearest known one, as Python does since 3.13."""
    known, where = list(inspect.signature(call).parameters), call.__qualname__.partition(".")[0]

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                near = get_close_matches(name, known, 1)
                more = f"did you mean {near[0]}=?" if near else f"there are {', '.join(known[1:])}"
                raise TypeError(f"{where}() has no argument {name}=; {more}")
        return call(*args, **kwargs)

    return checked


def check_timeout(timeout: float, name: str = "timeout") -> float:
    """A timeout as a float; math.inf, or a number that no float can hold, waits without limit.

    Raises ValueError unless it is 0 or more seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout >= 0:  # NaN is not
        raise ValueError(f"{name} must be 0 or more seconds (math.inf waits without limit), not {timeout!r}")
    try:
        return float(timeout)
    except OverflowError:
        return math.inf


DEFAULT_TIMEOUT = 10.0  # seconds


def timeout_or_default(timeout: float | None, default: float = DEFAULT_TIMEOUT, name: str = "timeout") -> float:
    """What a constructor's timeout= means, as a float: None is the default. Raises as check_timeout() does."""
    return default if timeout is None else check_timeout(timeout, name)


def timeout_or_none(timeout: float | None) -> float | None:
    """A call's timeout= as a float, or None; for a call that does not wait itself. Raises as check_timeout() does."""
    return None if timeout is None else check_timeout(timeout)


def whole(name: str, value: SupportsIndex, low: int, high: int = 1 << 48, wrong: type[Exception] = TypeError) -> int:
    """A whole number from `low` to `high`, of any library, as an int.

    Raises ValueError for one that is out of this range, and `wrong` for anything else.
    """
    if type(value) is int and low <= value <= high:  # the fast path: each wait for a version comes here
        return value
    wanted = f"{name} is a whole number from {low:,} to {high:,}"
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):  # NumPy's and torch's too
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise wrong(f"{wanted}, not {value!r} ({type(value).__name__}); give it as an int") from None
    if not low <= found <= high:
        raise ValueError(f"{wanted}, not {value!r}")
    return found


def check_version(version: int) -> int:
    """A version as an int. Raises ValueError unless it is a whole number, 0 or more."""
    return whole("version", version, 0, _native.MAX_VERSION, ValueError)


def check_worker(worker: int) -> int:
    """A worker index as an int. Raises ValueError unless it is from 0 to 2**31 - 1."""
    return whole("worker", worker, 0, (1 << 31) - 1, ValueError)


SLICE = 0.025  # seconds between two looks at the partner's life, so that its death is noticed within 50 ms


def slice_until(deadline: float, most: float = SLICE) -> int:
    """Nanoseconds to wait natively before the next look at the partner's life: to the deadline, at most so many s."""
    return int(max(0.0, min(deadline - time.monotonic(), most)) * 1e9)


def deadline_after(timeout: float | None, default: float) -> float:
    """The monotonic time at which a call that starts now gives up. `default` is used for None."""
    if timeout is None:
        return time.monotonic() + default
    return time.monotonic() + (timeout if type(timeout) is float and timeout >= 0 else check_timeout(timeout))


_KEPT = 4096  # samples per distribution


@dataclass(frozen=True)
class Latency:
    """A distribution of durations in seconds; all zeros while there are no samples.

    Attributes:
        count: of samples, over the whole life.
        total: their sum, over the whole life.
        p50: a percentile of the last 4,096 samples, as are the next two.
        p90: see p50.
        p99: see p50.
        max: over the whole life.
    """

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
