"""Large copies use the threads that torch may use, and leave none."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import shmsync

LARGE = 20 << 20  # bytes; from 16 MiB on helpers are started


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Counting(threading.Thread):
    """Counts the process's threads, those of the C++ code too, until it is told to stop."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.stop = 0, False

    def run(self):
        while not self.stop:
            self.most = max(self.most, len(os.listdir("/proc/self/task")))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop = True
        self.join()


def helped(publish):
    """Did a publish ever have more threads than the process has now?"""
    publish()
    with Counting() as counting:
        usual = len(os.listdir("/proc/self/task"))
        for _ in range(100):
            publish()
            if counting.most > usual:
                return True
    return False


@pytest.mark.parametrize("count", [1, 4])
def test_helpers_are_started_only_where_torch_may_use_several_threads(publisher, threads, count):
    source = {"w": torch.zeros(LARGE // 4)}
    pub = publisher(source)
    threads(count)
    assert helped(lambda: pub.publish(source)) is (count > 1)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[LARGE // 4], [1000] * 6000, [5, LARGE // 8, 0, 77, LARGE // 8]])
def test_every_byte_arrives(publisher, subscriber, threads, slots, sizes):
    threads(3)
    source = {f"{i:05}": torch.empty(size) for i, size in enumerate(sizes)}
    pub = publisher(source, slots=slots)
    sub = subscriber(pub)
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
        pub.publish(source)
        child = os.fork()
        if child == 0:
            with shmsync.Publisher(source) as own:
                own.publish(doubled)
                threads(1)  # torch's own threads are the parent's
                os._exit(0 if torch.equal(own.weights["w"], doubled["w"]) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(pub.weights["w"], source["w"])
