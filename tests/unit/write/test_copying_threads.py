"""Large copies use the threads that torch may use; those stay for a while and go by themselves."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

import shmsync
from support.calls import forked_child
from support.processes import until

LARGE = 20 << 20  # bytes; from 3 MiB on helpers are started
SEVERAL = len(os.sched_getaffinity(0)) > 1


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def helpers():
    """The ids of the threads that help to copy."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may end meanwhile
            found += [thread] if file.read() == "shmsync-copy\n" else []
    return found


def publish_until_helped(pub, source):
    until(lambda: pub.publish(source) and helpers())


@pytest.mark.parametrize("sizes", [[LARGE // 4], [1000] * 6000, [5, LARGE // 8, 0, 77, LARGE // 8]])
@pytest.mark.parametrize("slots", [1, 2])
def test_every_byte_arrives(both, threads, sizes, slots):
    threads(3)
    source = {f"{i:05}": torch.empty(size) for i, size in enumerate(sizes)}
    pub, sub = both(source, slots=slots)
    for _ in range(4):
        for leaf in source.values():
            leaf.normal_()
        pub.publish(source)
        with sub.read() as section:
            assert all(torch.equal(section.weights[key], leaf) for key, leaf in source.items())


def test_a_forked_child_has_helpers_of_its_own(threads):
    threads(4)
    source, doubled = {"w": torch.ones(LARGE // 4)}, {"w": torch.full((LARGE // 4,), 2.0)}
    with shmsync.Publisher(source) as pub:
        if SEVERAL:
            publish_until_helped(pub, source)

        def in_child():
            assert not helpers()
            with shmsync.Publisher(source) as own:
                own.publish(doubled)
                if SEVERAL:
                    publish_until_helped(own, doubled)
                threads(1)  # torch's own threads are the parent's
                assert torch.equal(own.weights["w"], doubled["w"])

        child = forked_child(in_child)
        for _ in range(10):
            pub.publish(source)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(pub.weights["w"], source["w"])


END = """
import os
import torch
import shmsync
torch.set_num_threads(4)
source = {"w": torch.ones(5 << 20)}
pub = shmsync.Publisher(source)
names = lambda: [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
while "shmsync-copy\\n" not in names():
    pub.publish(source)
print("there", flush=True)
"""
