"""Which counters of the kernel say that a process was killed for lack of memory."""

from __future__ import annotations

import pytest

import shmsync
from shmsync.workers.process import memory_kills
from support.jobs import workers as jobs
from support.processes import kill
from support.weights import stamped


def test_the_counter_of_kills_is_found_among_others(tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 71\noom_kill 3\ndrop_pagecache 9\n")
    assert memory_kills(vmstat) == 3
    vmstat.write_text("oom_kill nonsense\n")
    assert memory_kills(vmstat) == 0
    assert memory_kills(tmp_path / "missing") == 0


def test_a_kill_for_memory_is_named(monkeypatch):
    # What the kernel does at the end of memory is a SIGKILL, and one more in its counter.
    with shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as pub, shmsync.Workers(pub, jobs.apply, 2) as workers:
        kill(workers.procs[0].pid)
        workers._members[0]._memory_kills -= 1
        with pytest.raises(shmsync.WorkerDied, match="killed by SIGKILL.*possibly out of memory"):
            pub.publish(wait=True)
        kill(workers.procs[1].pid)
        with pytest.raises(shmsync.WorkerDied) as caught:
            pub.publish(wait=True)
        assert "memory" not in str(caught.value)
