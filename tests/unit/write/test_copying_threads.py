"""Large copies use the threads that torch may use; those stay for a while and go by themselves."""

from __future__ import annotations

import pytest
import torch

LARGE = 20 << 20  # bytes; from 3 MiB on helpers are started


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [[LARGE // 4], [1000] * 6000, [5, LARGE // 8, 0, 77, LARGE // 8]])
@pytest.mark.parametrize("slots", [1, 2])
def test_every_byte_arrives(both, threads, sizes, slots):
    threads(3)
    source = {f"{i:05}": torch.empty(size) for i, size in enumerate(sizes)}
    pub, sub = both(source, slots=slots)
    for _ in range(2):
        for leaf in source.values():
            leaf.normal_()
        pub.publish(source)
        with sub.read() as section:
            assert all(torch.equal(section.weights[key], leaf) for key, leaf in source.items())
