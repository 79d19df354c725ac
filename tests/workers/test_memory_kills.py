"""A kill for lack of memory, which the kernel counts, is named."""

from __future__ import annotations

import pytest

import shmsync
from support.jobs import workers as jobs
from support.processes import kill
from support.weights import stamped


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
