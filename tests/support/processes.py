"""What a test asks the kernel about processes and their arenas, what it does to them, and how it waits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import psutil

PATIENCE = 240  # seconds: long after a slow machine is done, and before the watchdog of the test


def until(condition):
    """Wait for it; fail after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {condition}"
        time.sleep(0.002)


# ---- life and death


def alive(pid):
    return state(pid) not in ("", "Z")


def state(pid):
    """The letter of /proc, "T" for one that was stopped; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def workers():
    """The living processes of multiprocessing that this one has started, directly or over its fork server."""
    server = forkserver._forkserver._forkserver_pid
    found = [] if server is None else [child.pid for child in psutil.Process(server).children()]
    return {pid for pid in [*found, *(child.pid for child in multiprocessing.active_children())] if alive(pid)}


def kill(pid):
    """SIGKILL, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def stop(pid):
    """SIGSTOP, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")


def resume(pid):
    """SIGCONT. One that has ended meanwhile needs none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def until_waits(thread, function):
    """Until this thread of ours is inside a function of this name, and has stopped there."""
    before, end = None, time.monotonic() + PATIENCE
    while True:
        assert time.monotonic() < end, f"{thread.name} does not wait in {function}()"
        frame = sys._current_frames().get(thread.ident)
        place = frame and (frame.f_code, frame.f_lasti)
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        if frame is not None and place == before and state(f"self/task/{thread.native_id}") == "S":
            return
        del frame
        before = place
        time.sleep(0.02)


def descriptors(pid="self"):
    """What a process has open: by number, what each leads to."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as the one that lists them is
            found[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


# ---- arenas


def slab_fds(pid="self"):
    return [fd for fd, target in descriptors(pid).items() if "memfd:shmsync" in target]


def slab_inodes(pid):
    return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in slab_fds(pid)}


def mapping_at(address):
    """(permissions, inode, path) of the memory at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return permissions, int(inode), path[0] if path else ""
    raise LookupError(hex(address))


def segment_path(name):
    """Of the arena of this name."""
    return Path(f"/dev/shm/shmsync.{name}")


def segments(pid=None):
    """The arenas that a process, by default this one, publishes: the paths of their control segments."""
    return sorted(Path("/dev/shm").glob(f"shmsync.{os.getpid() if pid is None else pid}-*"))


def remove_segments(pid):
    """What a killed publisher could not remove."""
    for path in segments(pid):
        path.unlink(missing_ok=True)
