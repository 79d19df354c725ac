"""What the machine can do without us: its wake-ups, its memory, its faults. All else is to be read beside these."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from common.clock import Clock
from common.measure import CONTEXT, percentiles, processes, rounds, timed
from common.row import OK, Pair, Row, times

from sections.readers import pipe_peer, raw_wakes

PAGE = 4096
HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def rows(clock: Clock) -> Iterator[Row]:
    clock.row(8)
    for readers in (1, 4):
        found = times(percentiles(raw_wakes(readers, 200 if clock.left > 2 else 20)))
        yield Row(f"futex wake of {readers} asleep, the call", theirs=found, check="each sleeper saw each number")
    yield Row("ping-pong of one byte over a pipe", theirs=times(ping_pong()), check=OK)
    for megabytes in (1, 100):
        clock.row(4)
        yield Row(f"memcpy of {megabytes} MB", theirs=memcpy(megabytes << 20), unit="GB/s", check=OK)
    clock.row(2)
    yield Row("first touch of a page of shared memory", theirs=first_touch(64 << 20), check=OK)
    yield Row(f"the same where huge pages are asked for (system: {huge_pages()})",
              theirs=first_touch(64 << 20, mmap.MADV_HUGEPAGE), check=OK)  # fmt: skip


def ping_pong() -> Pair:
    pipe, theirs = CONTEXT.Pipe()

    def once() -> None:
        pipe.send_bytes(b"x")
        assert pipe.recv_bytes() == b"ack", "checksum"

    with processes(pipe_peer, [(theirs,)]):
        once()
        samples = [timed(once) for _ in rounds(2000, fewest=50)]
        pipe.send_bytes(b"")
    return percentiles(samples)


def memcpy(size: int) -> Pair:
    """In GB/s: the median, and the slowest of a hundred."""
    source, target = torch.randint(0, 255, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def once() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    once()
    p50, p99 = percentiles([timed(once) for _ in rounds(max(20, (1 << 30) // size))])
    assert torch.equal(source, target), "checksum"
    return size / p50 / 1e9, size / p99 / 1e9


def first_touch(size: int, advice: int | None = None) -> Pair:
    """Of each page of 4 KB of new shared memory, in microseconds."""

    def touched() -> float:
        with mmap.mmap(-1, size) as memory:
            if advice is not None:
                memory.madvise(advice)
            seconds = _write_each_page(memory, size)
            assert memory[size - PAGE] == 1, "checksum"
        return seconds

    return times(percentiles([touched() / (size // PAGE) for _ in rounds(9)]))


def _write_each_page(memory: mmap.mmap, size: int) -> float:
    pages = torch.frombuffer(memory, dtype=torch.uint8)[::PAGE]
    seconds = timed(partial(pages.fill_, 1))
    del pages  # else the map could not be closed
    return seconds


def huge_pages() -> str:
    """The system's choice for shared memory."""
    try:
        found = (HUGE / "shmem_enabled").read_text()
    except OSError:
        return "unknown"
    return found.partition("[")[2].partition("]")[0]
