"""Readers never act on torn weights, while the writer publishes without pause.

Every word of every leaf carries the version. Bounded by counts of sections and versions, never by time.
No process is killed here; storms/test_storms.py does that.
"""

import math
from multiprocessing.connection import wait

import pytest
import torch

import shmsync
from support.jobs.engine import attach, detach
from support.weights import stamp, stamps

READERS = 4
# size: (sections, versions) that each reader has to accept
SIZES = {"10KB": (10_000, 300, 40), "4MB": (4 << 20, 30, 8), "64MB": (64 << 20, 6, 3)}


def read_until(state, reads, versions):
    """Read until so many sections and versions were accepted: (accepted, versions, torn ones among them)."""
    sub = state.sub
    seen, accepted, torn, last = set(), 0, [], 0

    def check():
        return (sub.version, *stamps(sub.weights))

    while accepted < reads or len(seen) < versions:
        if accepted % 4 == 3:  # a plain section, which says itself whether it may be accepted
            with sub.read() as section:
                found = (section.version, *stamps(section.weights))
            if section.torn:
                found = sub.run(check)
        else:
            found = sub.run(check)
        version, low, high = found
        if not low == high == version:
            torn.append(found)
        assert version >= last, f"version {version} after {last}"
        last = version
        accepted += 1
        seen.add(version)
    return accepted, len(seen), torn


@pytest.fixture(scope="module")
def readers(keep):
    return keep(READERS)


def weights_of(nbytes):
    """Leaves of several shapes and word sizes, large and small, that together take about so many bytes."""
    rows = nbytes // 8 // 16
    return {
        "embedding": torch.ones(rows, 8, dtype=torch.int64),
        "layer1.weight": torch.ones(rows, 8, dtype=torch.int32),
        "layer1.bias": torch.ones(3, dtype=torch.int64),
        "layer2.weight": torch.ones(rows // 2, 4, dtype=torch.float64),
        "layer2.scale": torch.ones((), dtype=torch.float32),
        "layer3.weight": torch.ones(rows * 2, dtype=torch.int64),
    }


def write_while(pub, source, going_on):
    """Publish and update in turns; every version bears its number."""
    while going_on():
        version = pub.version + 1
        if version % 2:
            stamp(source, version)
            assert pub.publish() == version
        else:
            with pub.update() as weights:
                stamp(weights, version)
    return pub.version


def all_answered(readers):
    pending = {reader.conn for reader in readers}

    def going_on():
        for conn in wait(pending, 0):
            pending.discard(conn)
        return bool(pending)

    return going_on


@pytest.mark.parametrize(
    ("size", "slots", "consistency"),
    [("10KB", 1, "pinned"), ("10KB", 1, "optimistic"), ("10KB", 3, "pinned"), ("10KB", 3, "optimistic"),
     ("4MB", 1, "optimistic"), ("64MB", 3, "pinned")],
)  # fmt: skip
def test_no_torn_weights_are_accepted(readers, size, slots, consistency):
    nbytes, sections, versions = SIZES[size]
    source = weights_of(nbytes)
    with shmsync.Publisher(source, slots=slots, timeout=math.inf) as pub:
        for index, reader in enumerate(readers):
            reader.call(attach, pub.handle, consistency=consistency, worker=index, timeout=math.inf)
            reader.start(read_until, sections, versions)
        last = write_while(pub, source, all_answered(readers))
        for reader in readers:
            accepted, seen, torn = reader.result()
            assert torn == []
            assert accepted >= sections
            assert seen >= versions
        assert last >= versions  # the writer got on as well: its versions are what they saw
        counts = pub.readers()
        assert [info.worker for info in counts] == list(range(READERS))
        if consistency == "pinned":
            assert all(info.torn == 0 for info in counts)
        for reader in readers:
            reader.call(detach)
