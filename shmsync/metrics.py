"""Figures of a publisher for dashboards: Prometheus, TensorBoard, Weights & Biases, OpenTelemetry.

They are read when a scrape asks for them, from `pub.stats()` and `pub.readers()`; in between they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .engine.publisher import Publisher, writer_of
from .engine.stats import ReaderInfo
from .errors import ClosedError, ForkedHandle, ProtocolError

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

_COUNTS = {
    "publishes": "publish() calls that published, the first included",
    "updates": "update() sections that published",
    "bytes_copied": "bytes copied into the weights' memory by this process",
    "aborted": "publishes and updates that were begun and taken back",
    "reaped": "rows taken back from readers that died in a section",
    "stalls": "calls that found no slot to write in time",
}
_TIMES = {
    "publish": "a publish(), or an update() without its body; waits for acks apart",
    "pin_wait": "waits for readers, of calls that had to wait",
    "ack_wait": "waits for acks, of calls with wait=",
}
_STATES = ("live", "stopped", "dead")
_QUANTILES = (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99"))
_READER = {
    "lag": "published versions that the reader has not applied",
    "pin_age_seconds": "how long the reader has been in its section; 0 outside",
}
_READER_COUNTS = {
    "reads": "sections entered",
    "torn": "sections whose weights changed meanwhile (optimistic and live)",
    "retries": "attempts to enter that met the writer",
}


def values(pub: Publisher, *, prefix: str = "shmsync/") -> dict[str, float]:
    """One flat dict of figures: `wandb.log(values(pub))`, or `writer.add_scalar(name, value, step)` for each.

    Args:
        pub: the publisher.
        prefix: stands before each name. "shmsync." gives names as OpenTelemetry has them.

    Returns:
        Version and counts, latencies in seconds, how many readers are in each state, and the largest lag and pin age of
        the living.

    Raises:
        ClosedError: the publisher is closed. ForkedHandle: it belongs to a parent of this process.
    """
    readers, stats = pub.readers(), pub.stats()
    living = [reader for reader in readers if reader.state.value != "dead"]
    found: dict[str, float] = {"version": stats.version}
    found |= {name: getattr(stats, name) for name in _COUNTS}
    for name in _TIMES:
        latency = getattr(stats, name)
        found |= {f"{name}.{part}": getattr(latency, part) for part in ("count", "p50", "p90", "p99", "max")}
    for state in _STATES:
        found[f"readers.{state}"] = _in_state(readers, state)
    found["readers.max_lag"] = max((reader.lag for reader in living), default=0)
    found["readers.max_pin_age"] = max((reader.pin_age for reader in living), default=0.0)
    return {prefix + name: value for name, value in found.items()}


def prometheus(pub: Publisher, registry: CollectorRegistry | None = None) -> PublisherCollector:
    """Let Prometheus see a publisher: `prometheus(pub)`, then `prometheus_client.start_http_server(9400)`.

    Every figure has the label `arena`, those of readers `worker` and `pid` too. A closed publisher has none any more;
    `unregister()` forgets it.

    Args:
        pub: the publisher. Several publishers of one process may be added, under different names.
        registry: None is prometheus_client's own.

    Returns:
        The collector, registered.

    Raises:
        ImportError: prometheus_client is missing (shmsync[metrics]).
        ProtocolError: a publisher of this name is there already.
        ClosedError: the publisher is closed.
        ForkedHandle: the publisher belongs to the parent process.
    """
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError as error:
        raise ImportError("metrics for Prometheus need prometheus_client: pip install 'shmsync[metrics]'") from error
    return PublisherCollector(pub, REGISTRY if registry is None else registry)


class PublisherCollector:
    """What prometheus() returns for `pub`: asked by a registry at each scrape."""

    def __init__(self, pub: Publisher, registry: CollectorRegistry) -> None:
        writer_of(pub).check()  # raises for one that is closed, or a parent's
        self._pub = pub
        added = _of_registry.get(registry)
        if added is None:
            added = {}
            registry.register(_Everybody(added))
            _of_registry[registry] = added
        if pub.name in added and not added[pub.name].closed:
            raise ProtocolError(f"arena {pub.name!r} is in this registry already; unregister() that one first")
        self._added = added
        added[pub.name] = self

    def unregister(self) -> None:
        """Forget the publisher. Idempotent."""
        if self._added.get(self._pub.name) is self:
            del self._added[self._pub.name]

    @property
    def closed(self) -> bool:
        """Has the publisher been closed, or is it a parent's?"""
        side = writer_of(self._pub)
        return side.closed or side.in_parent

    @property
    def publisher(self) -> Publisher:
        """Whose figures they are."""
        return self._pub


class _Everybody:
    """All publishers of one registry: a metric may come once only, with an arena in each of its samples."""

    def __init__(self, added: dict[str, PublisherCollector]) -> None:
        self._added = added

    def collect(self) -> Iterator[Any]:
        return _families([each.publisher for each in list(self._added.values())])

    def describe(self) -> list[Any]:
        """Nothing yet: else a registry would ask for all figures when this is registered."""
        return []


_of_registry: WeakKeyDictionary[Any, dict[str, PublisherCollector]] = WeakKeyDictionary()


def _by_labels(readers: Iterable[ReaderInfo]) -> dict[tuple[str, str], list[ReaderInfo]]:
    """By worker and pid: a process may have several subscribers of one index, or of none, and a series is one value."""
    found: dict[tuple[str, str], list[ReaderInfo]] = {}
    for reader in readers:
        found.setdefault(("" if reader.worker is None else str(reader.worker), str(reader.pid)), []).append(reader)
    return found


def _in_state(readers: Iterable[ReaderInfo], state: str) -> int:
    return sum(reader.state.value == state for reader in readers)


def _families(publishers: Iterable[Publisher]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    seen = []
    for pub in publishers:
        try:
            seen.append((pub.name, pub.stats(), pub.readers()))
        except (ClosedError, ForkedHandle):
            continue

    def family(kind: Any, name: str, text: str, labels: str, samples: Iterable[tuple[list[str], float]]) -> Any:
        made = kind(f"shmsync_{name}", text, labels=labels.split())
        for values, value in samples:
            made.add_metric(values, value)
        return made

    versions = [([arena], stats.version) for arena, stats, _ in seen]
    yield family(GaugeMetricFamily, "version", "the published version", "arena", versions)
    for name, text in _COUNTS.items():
        counts = [([arena], getattr(stats, name)) for arena, stats, _ in seen]
        yield family(CounterMetricFamily, name, text, "arena", counts)
    for name, text in _TIMES.items():
        latencies = [(arena, getattr(stats, name)) for arena, stats, _ in seen]
        summary = SummaryMetricFamily(f"shmsync_{name}_seconds", text, labels=["arena"])
        for arena, latency in latencies:
            summary.add_metric([arena], count_value=latency.count, sum_value=latency.total)
        yield summary
        parts = [([arena, each], getattr(latency, part)) for arena, latency in latencies for each, part in _QUANTILES]
        yield family(GaugeMetricFamily, f"{name}_quantile_seconds", f"{text}; the last 4,096", "arena quantile", parts)
    states = [([arena, state], _in_state(readers, state)) for arena, _, readers in seen for state in _STATES]
    yield family(GaugeMetricFamily, "readers", "readers in each state", "arena state", states)
    series = [([arena, *who], same) for arena, _, readers in seen for who, same in _by_labels(readers).items()]
    for name, text in _READER.items():
        attribute = name.removesuffix("_seconds")
        most = [(who, max(getattr(reader, attribute) for reader in same)) for who, same in series]
        yield family(GaugeMetricFamily, f"reader_{name}", text, "arena worker pid", most)
    for name, text in _READER_COUNTS.items():
        sums = [(who, sum(getattr(reader, name) for reader in same)) for who, same in series]
        yield family(CounterMetricFamily, f"reader_{name}", text, "arena worker pid", sums)
