"""Figures of a publisher for Prometheus.

They are read when a scrape asks for them, from `pub.stats()` and `pub.readers()`; in between they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from .engine.publisher import Publisher, writer_of
from .errors import ClosedError, ForkedHandle

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
_OF_READERS: dict[str, tuple[str, Any]] = {  # and how several readers of one process become one series
    "lag": ("published versions that the reader has not applied", max),
    "pin_age": ("how long the reader has been in its section, in seconds; 0 outside", max),
    "reads": ("sections entered", sum),
    "torn": ("sections whose weights changed meanwhile (optimistic and live)", sum),
    "retries": ("attempts to enter that met the writer", sum),
}


def prometheus(pub: Publisher, registry: CollectorRegistry | None = None) -> None:
    """Let Prometheus see a publisher: `prometheus(pub)`, then `prometheus_client.start_http_server(9400)`.

    Every figure has the label `arena`, those of readers `worker` and `pid` too. A closed publisher has none any more.
    `registry`: None is prometheus_client's own; it may have several publishers.
    Raises ImportError without prometheus_client, ClosedError for a closed publisher, ForkedHandle for a parent's.
    """
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError as error:
        raise ImportError("metrics for Prometheus need prometheus_client: pip install 'shmsync[metrics]'") from error
    writer_of(pub).check()  # raises for one that is closed, or a parent's
    registry = REGISTRY if registry is None else registry
    if registry not in _of_registry:
        _of_registry[registry] = _Publishers()
        registry.register(_of_registry[registry])
    _of_registry[registry].publishers[pub.name] = pub


class _Publishers:
    """All publishers of one registry, by name: a metric may come once only, with the samples of all arenas."""

    def __init__(self) -> None:
        self.publishers: WeakValueDictionary[str, Publisher] = WeakValueDictionary()

    def describe(self) -> list[Any]:
        """Nothing yet: else a registry would ask for all figures when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        families: dict[str, Any] = {}

        def add(kind: Any, name: str, text: str, labels: dict[str, str], *value: float) -> None:
            if name not in families:
                families[name] = kind(f"shmsync_{name}", text, labels=list(labels))
            families[name].add_metric(list(labels.values()), *value)

        for name, pub in list(self.publishers.items()):
            try:
                stats, readers = pub.stats(), pub.readers()
            except (ClosedError, ForkedHandle):
                self.publishers.pop(name, None)
                continue
            arena = {"arena": name}
            add(GaugeMetricFamily, "version", "the published version", arena, stats.version)
            for count, text in _COUNTS.items():
                add(CounterMetricFamily, count, text, arena, getattr(stats, count))
            for what, text in _TIMES.items():
                latency = getattr(stats, what)
                add(SummaryMetricFamily, f"{what}_seconds", text, arena, latency.count, latency.total)
                for quantile, value in (("0.5", latency.p50), ("0.9", latency.p90), ("0.99", latency.p99)):
                    labels = arena | {"quantile": quantile}
                    add(GaugeMetricFamily, f"{what}_quantile_seconds", f"{text}; the last 4,096", labels, value)
            for state in _STATES:
                count_of = sum(reader.state.value == state for reader in readers)
                add(GaugeMetricFamily, "readers", "readers in each state", arena | {"state": state}, count_of)
            # A process may have several subscribers of one index, or of none, and a series is one value.
            alike: dict[tuple[str, str], list[Any]] = {}
            for reader in readers:
                worker = "" if reader.worker is None else str(reader.worker)
                alike.setdefault((worker, str(reader.pid)), []).append(reader)
            for (worker, pid), same in alike.items():
                for figure, (text, combined) in _OF_READERS.items():
                    kind = GaugeMetricFamily if combined is max else CounterMetricFamily
                    metric = "reader_pin_age_seconds" if figure == "pin_age" else f"reader_{figure}"
                    value = combined(getattr(reader, figure) for reader in same)
                    add(kind, metric, text, arena | {"worker": worker, "pid": pid}, value)
        yield from families.values()


_of_registry: WeakKeyDictionary[Any, _Publishers] = WeakKeyDictionary()
