"""What processes hold: memory, descriptors, threads, mappings, segments."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
from pathlib import Path

import torch

import shmsync
from support.processes import descriptors
from support.weights import Net, stamp, stamped


def slab_fds(pid="self"):
    return [fd for fd, target in descriptors(pid).items() if "memfd:shmsync" in target]


def slab_inodes(pid):
    return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in slab_fds(pid)}


def holders(inode):
    """Processes that map this memfd, or have it open."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            maps = Path(f"/proc/{entry}/maps").read_text()
            if re.search(rf" {inode} +/memfd:shmsync", maps) or inode in slab_inodes(entry):
                found.add(int(entry))
        except (OSError, ValueError):
            pass
    return found


def mapping_at(address):
    """(permissions, inode, path) of the memory at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return permissions, int(inode), path[0] if path else ""
    raise LookupError(hex(address))


# ---- what a process holds


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


def sealed_here(state=None):
    """Of sealed weights: how many descriptors this process has, and how many mappings."""
    gc.collect()
    places = descriptors().values(), Path("/proc/self/maps").read_text().splitlines()
    return tuple(sum("shmsync-weights" in each for each in place) for place in places)
