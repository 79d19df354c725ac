"""What a test asks the kernel about processes and their arenas, what it does to them, and how it waits."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path


def until(condition):
    """Wait for it; the test's watchdog is the limit."""
    while not condition():
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


def kill(pid):
    """SIGKILL, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def stop(pid):
    """SIGSTOP, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")


def resume(pid):
    os.kill(pid, signal.SIGCONT)


def wait_until_dead(pid):
    """Of a process that somebody else waits for."""
    fd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.poll()
    os.close(fd)


def sleeps(thread):
    """Does this thread of this process wait in the kernel?"""
    return thread.native_id is not None and state(f"self/task/{thread.native_id}") == "S"


# ---- arenas


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
