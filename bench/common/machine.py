"""What else runs on the machine: other programs, and what a section left."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import time
from pathlib import Path

import psutil

IDLE = (3, 4)  # fields of /proc/stat: idle, iowait
PR_SET_CHILD_SUBREAPER = 36


def _ticks() -> tuple[int, int]:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), sum(fields[index] for index in IDLE)


def busy(seconds: float = 0.3) -> float:
    """The part of all processors that was in use, between 0 and 1; time that the host took counts as used."""
    all_before, idle_before = _ticks()
    time.sleep(seconds)
    all_after, idle_after = _ticks()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents have exited, whatever their process group is."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(process: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """Terminate the process, and kill every descendant of this one that is left after at most `patience` seconds."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
    left = psutil.Process().children(recursive=True)
    for each in left:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()
    psutil.wait_procs(left, timeout=patience)
