"""What `top` remembers from look to look: versions per second and lags, and in which order the rows stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...memory.inspection import ArenaSeen, ReaderSeen, look_at_all
from ...memory.process import Peers
from ..measures import holders, rate

_LONG = 120  # looks that are kept
_BARS, _ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"

ARENA_SORTS = ("name", "rate", "lag", "readers")
READER_SORTS = ("holding", "lag", "worker", "pid", "reads", "torn")


class History:
    """The looks so far at one arena, or at all."""

    def __init__(self, names: list[str] | None) -> None:
        self._names = names  # None: all
        self._peers = Peers()
        self.looks = 0
        self.arenas: list[ArenaSeen] = []
        self.rates: dict[str, deque[float]] = {}
        self.lags: dict[tuple[str, int, int], deque[float]] = {}

    def look(self) -> None:
        """Look again."""
        self.looks += 1
        before = {seen.name: seen for seen in self.arenas}
        self.arenas = look_at_all(self._names, self._peers)
        for seen in self.arenas:
            now = rate(before.get(seen.name), seen)
            if now is None:
                self.rates[seen.name] = deque(maxlen=_LONG)  # the first look; or another publisher has the name
            else:
                self.rates[seen.name].append(now)
        there = {_key(seen, reader): reader.lag for seen in self.arenas for reader in seen.readers}
        self.lags = {key: self.lags.get(key, deque(maxlen=_LONG)) for key in there}
        for key, lag in there.items():
            self.lags[key].append(lag)

    def rate_of(self, seen: ArenaSeen) -> float | None:
        """Versions in a second, between the last two looks."""
        rates = self.rates.get(seen.name)
        return rates[-1] if rates else None

    def lags_of(self, seen: ArenaSeen, reader: ReaderSeen) -> Sequence[float]:
        """The lag of a reader at each look."""
        return self.lags.get(_key(seen, reader), ())

    def close(self) -> None:
        """Give the descriptors back."""
        self._peers.close()

    def sorted_arenas(self, by: str, backwards: bool) -> list[ArenaSeen]:
        """The arenas in this order."""
        orders: dict[str, Callable[[ArenaSeen], Any]] = {
            "name": lambda seen: seen.name,
            "rate": lambda seen: -(self.rate_of(seen) or 0.0),
            "lag": lambda seen: -most_lag(seen),
            "readers": lambda seen: -len(seen.readers),
        }
        return sorted(self.arenas, key=orders[by], reverse=backwards)

    def sorted_readers(self, seen: ArenaSeen, by: str, backwards: bool) -> list[ReaderSeen]:
        """The readers of an arena in this order; readers that block the publisher come first."""
        holding = {reader.row: number for number, reader in enumerate(holders(seen))}
        orders: dict[str, Callable[[ReaderSeen], Any]] = {
            "holding": lambda reader: (-reader.lag, -reader.pin_age),
            "lag": lambda reader: -reader.lag,
            "worker": lambda reader: (reader.worker is None, reader.worker or 0, reader.pid),
            "pid": lambda reader: reader.pid,
            "reads": lambda reader: -reader.reads,
            "torn": lambda reader: -reader.torn,
        }
        ordered = sorted(seen.readers, key=orders[by], reverse=backwards)
        return sorted(ordered, key=lambda reader: holding.get(reader.row, len(holding)))


def most_lag(seen: ArenaSeen) -> int:
    """The lag of the reader that is furthest behind."""
    return max((reader.lag for reader in seen.readers), default=0)


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool) -> str:
    """The last values as bars, from 0 to the largest of them."""
    bars = _ASCII if ascii_only else _BARS
    last = list(values)[-width:]
    top = max(last, default=0.0) or 1.0
    return "".join(bars[min(len(bars) - 1, int(value / top * len(bars)))] for value in last).rjust(width)


def _key(seen: ArenaSeen, reader: ReaderSeen) -> tuple[str, int, int]:
    return seen.session, reader.row, reader.pid
