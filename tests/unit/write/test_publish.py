"""publish(), in one process: what it writes, what it refuses, what it counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from shmsync.engine.write.writer import Writer


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_versions_count_up_and_readers_see_them(both, slots):
    source = {"t": torch.zeros(4)}
    pub, sub = both(source, slots=slots)
    assert pub.version == sub.version == 1
    for version in range(2, 9):
        source["t"].fill_(version)
        assert pub.publish() == version
        assert sub.lag == 1
        with sub.read() as section:
            assert section.version == version
            assert section.weights["t"].tolist() == [version] * 4
        assert not section.torn


BAD = {
    "shape": lambda good: {**good, "299": torch.zeros(3)},
    "dtype": lambda good: {**good, "299": torch.zeros(2, dtype=torch.float64)},
    "key": lambda good: {**good, "300": torch.zeros(2)},
    "device": lambda good: {**good, "299": torch.zeros(2, device="meta")},
    "type": lambda good: {**good, "299": "3"},
}


@pytest.mark.parametrize("kind", BAD)
def test_one_wrong_leaf_of_300_changes_nothing(both, kind):
    good = {str(i): torch.full((2,), float(i)) for i in range(300)}
    pub, sub = both(good)
    before = {key: value.clone() for key, value in sub.weights.items(True, True)}
    bad = BAD[kind]({key: value + 1 for key, value in good.items()})
    with pytest.raises(shmsync.ManifestMismatch, match=r"1 difference.*nothing was written"):
        pub.publish(bad)
    assert pub.version == 1
    assert not sub.refresh()
    assert all(torch.equal(before[key], value) for key, value in sub.weights.items(True, True))


def test_a_mismatch_lists_every_problem(publisher):
    pub = publisher(nn.Linear(2, 3))
    with pytest.raises(shmsync.ManifestMismatch) as error:
        pub.publish(nn.Sequential(nn.Linear(2, 3)))
    for said in ("0.weight is not in the arena", "0.bias is not in the arena", "weight is missing", "bias is missing"):
        assert said in str(error.value)


def test_publishing_the_arena_into_itself_is_refused_unless_it_is_in_place(publisher):
    pub = publisher({"a": torch.ones(4), "b": torch.zeros(4)})
    assert pub.publish(pub.weights) == 2
    with pytest.raises(shmsync.ManifestMismatch, match="clone"):
        pub.publish({"a": pub.weights["b"]})
    assert pub.publish({"a": pub.weights["b"].clone()}) == 3
    assert pub.weights["a"].sum() == 0


def test_names(publisher):
    pub = publisher({"t": torch.ones(1)}, name="unit-test-name")
    with pytest.raises(shmsync.ArenaExists, match="unit-test-name"):
        shmsync.Publisher({"t": torch.ones(1)}, name="unit-test-name")
    pub.close()
    publisher({"t": torch.ones(1)}, name="unit-test-name")
    with pytest.raises(ValueError, match="not '../x'"):
        shmsync.Publisher({"t": torch.ones(1)}, name="../x")


def test_ranks_that_start_at_once_are_told_to_publish_from_one(publisher, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    source = {"t": torch.ones(1)}
    late = Writer(source, "unit-test-name", slots=1, max_readers=4, device=None, dtype=None, filter=None, timeout=9)
    publisher(source, name="unit-test-name")
    with pytest.raises(shmsync.ArenaExists, match="'unit-test-name' is taken: .* publish from one rank"):
        late.open()
    late.close()


def test_stats_count_what_happened(publisher, subscriber):
    pub = publisher({"t": torch.ones(10)})
    sub = subscriber(pub, worker=1)
    with pub.update():
        pass
    with sub.read():
        (info,) = pub.readers()
        assert info.pinned == 2 and info.worker == 1 and info.lag == 0
        assert info.state == "live"
    stats = pub.stats()
    assert (stats.version, stats.publishes, stats.updates, stats.bytes_copied) == (2, 1, 1, 40)
    assert stats.publish.count == 2 and stats.publish.max >= stats.publish.p50 > 0
    with pytest.raises(AttributeError):
        stats.version = 3
    assert sub.stats().reads >= 2 and sub.stats().moves == 2


def test_a_publish_that_gives_nothing_is_refused(publisher):
    pub = publisher(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), exclude="1.*")
    for nothing in ({}, {"1.bias": torch.zeros(2)}):
        with pytest.raises(shmsync.ManifestMismatch, match="none of the arena's leaves"):
            pub.publish(nothing)
    assert pub.version == 1
