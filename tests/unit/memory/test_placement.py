"""On which NUMA nodes the pages of a slab lie."""

from __future__ import annotations

import logging
import mmap
import os
import re

import pytest
import torch

import shmsync
from shmsync.memory.slab import placement
from support.processes import segments

SIZE = 8 << 20


@pytest.fixture
def memfd():
    fd = os.memfd_create("placed")
    yield fd
    os.close(fd)


def policies(mapping_of):
    """What the kernel shows of the mappings of this file; None where it does not name nodes."""
    try:
        with open("/proc/self/numa_maps") as file:
            return [line.split()[1] for line in file if mapping_of in line]
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("value", [None, "", "first-touch", "interleave"])
def test_weights_arrive_wherever_their_pages_lie(publisher, subscriber, monkeypatch, value):
    monkeypatch.delenv(placement.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(placement.VARIABLE, value)
    source = {"w": torch.arange(3 << 18, dtype=torch.float32)}
    pub = publisher(source, slots=2)
    with subscriber(pub).read() as section:
        assert torch.equal(section.weights["w"], source["w"])


@pytest.mark.parametrize("value", ["Interleave", "node0", "interleave "])
def test_a_setting_that_does_not_exist_is_refused_and_nothing_is_left(monkeypatch, value):
    monkeypatch.setenv(placement.VARIABLE, value)
    before = len(os.listdir("/proc/self/fd")), set(segments())
    with pytest.raises(ValueError, match=rf"SHMSYNC_PLACEMENT is {value!r}, but can be 'first-touch' or 'interleave'"):
        shmsync.Publisher({"w": torch.zeros(4)})
    assert (len(os.listdir("/proc/self/fd")), set(segments())) == before


def test_pages_that_come_later_follow_it(memfd, caplog):
    """Over the one node that every machine has; the kernel keeps it with the file, for every mapping."""
    with caplog.at_level(logging.WARNING, "shmsync"):
        done = placement.interleave(memfd, SIZE, [placement.nodes_with_memory()[0]])
    assert bool(caplog.records) is not done
    os.posix_fallocate(memfd, 0, SIZE)
    with mmap.mmap(memfd, SIZE) as mapping:
        mapping[:8] = b"touched!"
        found = policies("/memfd:placed")
        if done and found is not None:
            assert len(found) == 1 and re.fullmatch(r"interleave.*:\d+", found[0])


def test_nodes_that_are_not_there_are_refused_with_a_line_in_the_log(memfd, caplog):
    with caplog.at_level(logging.WARNING, "shmsync"):
        assert not placement.interleave(memfd, SIZE, [1000])
    (record,) = caplog.records
    assert "SHMSYNC_PLACEMENT=interleave was not followed" in record.getMessage()
    os.posix_fallocate(memfd, 0, SIZE)  # it has its pages all the same
    assert os.fstat(memfd).st_size == SIZE


def test_the_nodes_are_those_that_the_process_may_use():
    nodes = placement.nodes_with_memory()
    assert nodes == sorted(set(nodes)) and nodes
