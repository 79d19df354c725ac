"""shmsync.metrics: the figures of a publisher in Prometheus' text format, in one dict, and in the dashboard."""

import gc
import weakref

import pytest

import shmsync
from shmsync import metrics
from support.jobs.engine import attach, enter, refresh
from support.weights import stamped

prometheus_client = pytest.importorskip("prometheus_client", reason="needs shmsync[metrics]")


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def scraped(registry):
    """What Prometheus would read: {(name, labels): value}, parsed by its own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus_client.generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def of(found, name, **labels):
    return found.get((name, tuple(sorted(labels.items()))))


def test_every_figure_is_that_of_the_publisher(start, registry):
    late, killed = start(2)
    with shmsync.Publisher(stamped(1), slots=2) as pub:
        for index, worker in enumerate((late, killed)):
            worker.call(attach, pub.handle, worker=index)
            worker.call(refresh)
        late.call(enter)
        killed.kill()
        metrics.prometheus(pub, registry)
        pub.publish(stamped(2))
        found, arena, stats = scraped(registry), pub.name, pub.stats()
        assert of(found, "shmsync_version", arena=arena) == 2
        assert of(found, "shmsync_publishes_total", arena=arena) == stats.publishes == 2
        assert of(found, "shmsync_bytes_copied_total", arena=arena) == stats.bytes_copied > 0
        assert of(found, "shmsync_publish_seconds_count", arena=arena) == stats.publish.count
        assert of(found, "shmsync_publish_seconds_sum", arena=arena) == pytest.approx(stats.publish.total)
        assert of(found, "shmsync_publish_quantile_seconds", arena=arena, quantile="0.99") == stats.publish.p99
        assert of(found, "shmsync_reader_lag", arena=arena, worker="0", pid=str(late.pid)) == 1
        assert of(found, "shmsync_reader_pin_age_seconds", arena=arena, worker="0", pid=str(late.pid)) > 0
        reads = next(reader.reads for reader in pub.readers() if reader.worker == 0)
        assert of(found, "shmsync_reader_reads_total", arena=arena, worker="0", pid=str(late.pid)) == reads > 0
        states = [of(found, "shmsync_readers", arena=arena, state=state) for state in ("live", "stopped", "dead")]
        assert states == [1, 0, 1]
        late.stop()
        assert of(scraped(registry), "shmsync_readers", arena=arena, state="stopped") == 1
    assert scraped(registry) == {}


def test_a_registry_does_not_keep_a_publisher(registry):
    pub = shmsync.Publisher(stamped(1))
    metrics.prometheus(pub, registry)
    gone = weakref.ref(pub)
    with pytest.warns(ResourceWarning):  # noqa: PT031
        del pub
        gc.collect()
    assert gone() is None
    assert scraped(registry) == {}


def test_a_new_publisher_takes_the_place_of_a_closed_one(registry, name):
    for version in (1, 2):
        with shmsync.Publisher(stamped(1), name=name) as pub:
            metrics.prometheus(pub, registry)
            for each in range(1, version):
                pub.publish(stamped(each + 1))
            assert of(scraped(registry), "shmsync_version", arena=name) == version
    with pytest.raises(shmsync.ClosedError):
        metrics.prometheus(pub, registry)
