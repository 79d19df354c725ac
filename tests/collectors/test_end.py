"""What a collector leaves when it ends, or its trainer is killed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import psutil
import pytest

import shmsync
from shmsync.collectors import MultiprocessCollector
from support.environments.basic import Constant, Counting
from support.processes import until


def test_a_shut_down_collector_leaves_nothing_but_its_last_batch():
    options = {"num_workers": 2, "frames_per_batch": 40}
    with MultiprocessCollector(Counting, Constant(), **options) as first:
        next(first)  # the fork server runs now, and what torch opens once is open
    del first
    gc.collect()
    children, fds = set(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd"))
    batches = MultiprocessCollector(Counting, Constant(), **options)
    pids = [member.process.pid for member in batches._members.values()]
    batch = next(batches)
    batches.shutdown()
    batches.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert batch["observation"].sum() > 0
    assert set(psutil.Process().children(recursive=True)) <= children
    with pytest.raises(shmsync.ClosedError):
        next(batches)
    del batch, batches
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds


PROGRAM = """
import sys
from support.environments.basic import Constant, Counting
from shmsync.collectors import MultiprocessCollector
if __name__ == "__main__":
    batches = MultiprocessCollector(Counting, Constant(), num_workers=2, frames_per_batch=40, sync=False)
    next(batches)
    print(*[member.process.pid for member in batches._members.values()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_workers_go_when_the_trainer_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trainer = subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.kill()
    trainer.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
