"""publish() of large and of many weights, beside the fastest flat copy of the same bytes with as many threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial

import torch
from common.clock import Clock, Job
from common.measure import side_by_side, timed
from common.row import Row
from torch import nn

import shmsync

CASES = ((14, 1, 200), (14, 10, 50), (14, 100, 15), (300, 100, 15), (14, 1000, 5))  # tensors, megabytes, rounds


def rows(clock: Clock) -> Iterator[Row]:
    jobs = [Job(small_row, 1, "publish 1.6 MB in 200 tensors")]
    for count, megabytes, most in CASES:
        what = f"publish {megabytes} MB in {count} tensors"
        jobs.append(Job(partial(large_rows, count, megabytes, most), 3, what, cost=megabytes / 100))
    return clock.rows(jobs)


def layers(count: int, total_bytes: int) -> nn.Module:
    """`count` parameters of equal size."""
    each = total_bytes // 4 // count
    return nn.ParameterList([nn.Parameter(torch.rand(each), requires_grad=False) for _ in range(count)])


def large_rows(count: int, megabytes: int, most: int, threads: tuple[int, ...] = (1, 2, 4)) -> Iterator[Row]:
    """With so many threads allowed to torch and to us; the floor is the faster of its copy and of memcpy."""
    module = layers(count, megabytes << 20)
    with shmsync.Publisher(module) as pub:
        flat = torch.cat([p.data for p in module])
        target = pub._writer.arena.weights(0, writable=True).get("0").untyped_storage()
        slab = torch.empty(0).set_(target, 0, (flat.numel(),), (1,))
        ways = {
            "torch.copy_": lambda: slab.copy_(flat),
            "memcpy": lambda: ctypes.memmove(slab.data_ptr(), flat.data_ptr(), flat.nbytes),
        }
        try:
            for number in threads:
                torch.set_num_threads(number)
                name, floor = min(ways.items(), key=lambda item: min(timed(item[1]) for _ in range(4)))
                allowed = "1 thread" if number == 1 else f"{number} threads"
                what = f"publish {megabytes} MB in {count} tensors, {allowed}"
                yield side_by_side(f"{what} / {name}", pub.publish, floor, most, "1.0 x")
        finally:
            torch.set_num_threads(1)
        module[0].data.add_(1)
        pub.publish()
        assert all(torch.equal(pub.weights[str(i)], p) for i, p in enumerate(module)), "checksum"


def small_row() -> Iterator[Row]:
    module = layers(200, 1_600_000)
    with shmsync.Publisher(module) as pub:
        flat, slab = torch.cat([p.data for p in module]), torch.empty(400_000)
        ctypes_copy = lambda: ctypes.memmove(slab.data_ptr(), flat.data_ptr(), flat.nbytes)  # noqa: E731
        yield side_by_side("publish 1.6 MB in 200 tensors / memcpy", pub.publish, ctypes_copy, 300, "+ 15 us")
        module[7].data.fill_(3)
        pub.publish()
        assert torch.equal(pub.weights["7"], module[7]), "checksum"
