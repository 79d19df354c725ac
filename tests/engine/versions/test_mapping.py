"""One mapping, one descriptor, one copy of the weights; close() removes all of them."""

import gc
import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch

import shmsync
from support.jobs.engine import attach, close_publisher, detach, look, open_arena
from support.processes import descriptors, slab_fds, slab_inodes, until
from support.weights import Net, stamp, stamped

MB = 10**6


# ---- what workers run


def limit_descriptors(state, count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def open_many(state, tensors):
    state.words = None
    state.pub = shmsync.Publisher({f"block{i % 50}.w{i}": torch.full((16,), 1) for i in range(tensors)})
    return state.pub.handle


def update_all(state, version):
    with state.pub.update() as weights:
        stamp(weights, version)
    return len(os.listdir("/proc/self/fd"))


def open_untouched(state, nbytes, **kwargs):
    """A publisher whose source takes no memory: pages never written are all the one page of zeros."""
    state.pub = shmsync.Publisher({"w": torch.empty(nbytes, dtype=torch.uint8)}, **kwargs)
    with state.pub.update() as weights:
        weights["w"].fill_(7)
    return state.pub.handle


def touch_all(state):
    """Read one byte of every page; their sum."""
    weights = state.pub.weights if state.sub is None else state.sub.weights
    return int(weights["w"][::4096].sum())


def pss(pid):
    """Bytes, with shared pages split among those who map them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024


def simulated_streams(state):
    """How many threads the simulated device has in this process; none where arenas lie in the host's memory."""
    gc.collect()
    return sum(thread.name == "simulated stream" for thread in threading.enumerate())


def holdings(state):
    """Descriptors, threads, slab mappings and /dev/shm entries of this process."""
    gc.collect()
    prefix = f"shmsync.{os.getpid()}-"
    return {
        "descriptors": sorted(descriptors().values()),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("shmsync."),
        "slabs": Path("/proc/self/maps").read_text().count("memfd:shmsync"),
        "segments": sorted(entry for entry in os.listdir("/dev/shm") if entry.startswith(prefix)),
    }


def live_whole_life(state):
    """Publisher and subscriber of one arena in this process, used in every way, then closed."""
    net = Net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with shmsync.Publisher(net) as pub, shmsync.Subscriber(pub.handle, worker=0) as sub:
        module = sub.bind(Net(1))
        with torch.no_grad():
            module(torch.zeros(2, 6))
        pub.adopt(net, optimizer)
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        pub.publish(wait=None)
        sub.snapshot()
        pub.readers()
        sub.refresh()
    with shmsync.Publisher(stamped(1), slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        pub.publish()
        sub.refresh()


# ---- tests


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
