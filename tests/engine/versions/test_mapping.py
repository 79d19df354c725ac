"""One mapping, one descriptor, one copy of the weights; close() removes all of them."""

import pytest

from support.holdings import (
    holdings,
    limit_descriptors,
    live_whole_life,
    open_many,
    open_untouched,
    pss,
    simulated_streams,
    slab_fds,
    slab_inodes,
    touch_all,
    update_all,
)
from support.jobs.engine import attach, close_publisher, detach, look, open_arena
from support.processes import until

MB = 10**6


@pytest.mark.host_memory(reason="it counts the descriptors of the slab's file")
def test_many_tensors_take_few_descriptors(start):
    writer, reader = start(2)
    for worker in (writer, reader):
        worker.call(limit_descriptors, 64)
    handle = writer.call(open_many, 5000)
    assert reader.call(attach, handle) == 1
    assert reader.call(look) == (1, 1, 1)
    assert writer.call(update_all, 2) < 64
    assert reader.call(look) == (2, 2, 2)
    # One descriptor of one memfd, whatever the number of tensors, and that in the publisher.
    assert len(slab_fds(writer.pid)) == len(slab_inodes(writer.pid)) == 1
    assert slab_fds(reader.pid) == []


@pytest.mark.host_memory(reason="it counts the pages of the host; staging memory lies there too")
def test_weights_are_in_memory_once(start):
    writer, *readers = start(9)

    def held(nbytes):
        """Bytes that the nine processes hold together when each has read all of the weights."""
        handle = writer.call(open_untouched, nbytes)
        for reader in readers:
            reader.call(attach, handle)
        for worker in (writer, *readers):
            assert worker.call(touch_all) == 7 * -(-nbytes // 4096)
        total = sum(pss(worker.pid) for worker in (writer, *readers))
        for reader in readers:
            reader.call(detach)
        writer.call(close_publisher)
        return total

    held(1 * MB)  # what the first arena brings in by way of code and allocator pools
    small = held(1 * MB)
    large = held(200 * MB)
    assert large - small <= 1.05 * 200 * MB
    assert large - small >= 0.95 * 199 * MB  # the measurement sees the slab at all


def left(workers, before):
    """Does one of these hold more than before? The kernel lists a thread for a moment after it has ended."""
    now = [worker.call(holdings) for worker in workers]
    return any(
        has["threads"] > had["threads"] or has != {**had, "threads": has["threads"]}
        for has, had in zip(now, before, strict=True)
    )


def test_nothing_is_left_after_close(start):
    worker = start()
    worker.call(live_whole_life)  # what torch and the interpreter keep after a first time
    until(lambda: worker.call(simulated_streams) == 0)  # their threads end a moment later than the arena
    before = worker.call(holdings)
    for _ in range(3):
        worker.call(live_whole_life)
    until(lambda: worker.call(simulated_streams) == 0)
    until(lambda: not left([worker], [before]))
    assert before["slabs"] == 0
    assert before["segments"] == []
    assert not any("memfd:shmsync" in target for target in before["descriptors"])


def test_closed_handle_keeps_no_weights(start):
    """`with Publisher(...) as pub` leaves `pub` behind; the memory must not stay with it."""
    writer, reader = start(2)
    reader.call(attach, writer.call(open_arena, 2))
    reader.call(look)
    reader.call(detach, keep=True)
    assert reader.call(holdings)["slabs"] == 0
    assert slab_fds(reader.pid) == []
    writer.call(close_publisher, keep=True)
    assert writer.call(holdings)["slabs"] == 0
    assert slab_fds(writer.pid) == []
