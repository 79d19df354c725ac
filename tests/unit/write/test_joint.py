"""Several arenas published as one: each of them, or none."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest
import torch

import shmsync
from shmsync.engine.publish_all import Publication as Source
from shmsync.engine.publish_all import publish_all as publish_jointly
from shmsync.engine.write.writing import WriteSide


def weights(value):
    return {"w": torch.full((100,), float(value))}


@pytest.fixture(params=[1, 3])
def pair(request):
    with (
        shmsync.Publisher(weights(1), slots=request.param) as a,
        shmsync.Publisher(weights(1), slots=request.param) as b,
    ):
        a.publish(weights(2))  # so that they count differently
        yield a, b


def seen(publisher, consistency="pinned"):
    with shmsync.Subscriber(publisher.handle, consistency=consistency) as sub:
        return sub.snapshot().version, sub.weights["w"][0].item()


def publish(pair, values, version, timeout=5.0, optional=None):
    sources = [Source(pub._writer, weights(value), optional) for pub, value in zip(pair, values, strict=True)]
    publish_jointly(sources, version, time.monotonic() + timeout)


def counted(publisher):
    stats = publisher.stats()
    return stats.publishes, stats.publish.count, stats.aborted


def test_each_is_counted_when_it_commits_and_not_before(pair, monkeypatch):
    before = [counted(pub) for pub in pair]
    publish(pair, (7, 8), 9)
    once = [(publishes + 1, times + 1, aborted) for publishes, times, aborted in before]
    assert [counted(pub) for pub in pair] == once

    def fail(_side, _deadline):
        raise shmsync.WriterBusy("the copies are not done")

    monkeypatch.setattr(WriteSide, "add_sums", fail)
    for publishing in (lambda: publish(pair, (1, 2), 10), *(partial(pub.publish, weights(3)) for pub in pair)):
        with pytest.raises(shmsync.WriterBusy):
            publishing()
    assert [counted(pub) for pub in pair] == [(*figures[:2], figures[2] + 2) for figures in once]


def test_none_is_changed_when_one_cannot_be_written(pair):
    before = [seen(pub) for pub in pair]
    slots = pair[1]._writer.arena.slots
    with contextlib.ExitStack() as held:  # all slots
        for number in range(slots):
            if number:
                pair[1].publish(weights(number))
            held.enter_context(held.enter_context(shmsync.Subscriber(pair[1].handle)).read())
        before[1] = (slots, float(pair[1].weights["w"][0]))
        figures = [counted(pub) for pub in pair]
        with pytest.raises(shmsync.ProtocolError):  # this thread itself is in the way
            publish(pair, (7, 8), 9)
        assert [counted(pub) for pub in pair] == [(*each[:2], each[2] + 1) for each in figures]
    for consistency in ("pinned", "optimistic"):
        assert [seen(pub, consistency) for pub in pair] == before
    publish(pair, (7, 8), 20)
    assert [seen(pub) for pub in pair] == [(20, 7.0), (20, 8.0)]


def test_versions_only_grow(pair):
    with pytest.raises(shmsync.ProtocolError, match="can be 3 or later, not 2"):
        publish(pair, (7, 8), 2)
    assert [seen(pub)[0] for pub in pair] == [2, 1]


def test_weights_that_lack_a_leaf_are_refused_unless_it_is_optional():
    with shmsync.Publisher({"w": torch.ones(2), "b": torch.ones(1)}) as pub:
        source = {"w": torch.zeros(2)}
        with pytest.raises(shmsync.ManifestMismatch, match="lack b"):
            publish_jointly([Source(pub._writer, source, frozenset())], 2, time.monotonic() + 5)
        publish_jointly([Source(pub._writer, source, {("b",)})], 2, time.monotonic() + 5)
        assert pub.weights["w"].sum() == 0 and pub.weights["b"] == 1
