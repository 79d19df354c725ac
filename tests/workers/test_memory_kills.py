"""A kill for lack of memory, which the kernel counts for each cgroup, is named."""

from __future__ import annotations

import functools

import pytest

import shmsync
from shmsync.workers import process
from support.jobs import workers as jobs
from support.processes import kill
from support.weights import stamped

KILLS = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/user.slice/job\n", "user.slice/job/memory.events"),
        ("5:devices:/\n4:hugetlb,memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("0::/docker/of-the-host\n", "memory.events"),  # only the container's own cgroup is mounted there
    ],
)
def test_a_kill_for_memory_in_its_cgroup_is_named(tmp_path, cgroup, counter, monkeypatch):
    # What the kernel does at the end of memory is a SIGKILL, and one more in its counter.
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    file = tmp_path / "sys/fs/cgroup" / counter
    file.parent.mkdir(parents=True)
    file.write_text(KILLS.format(3))
    monkeypatch.setattr(process, "memory_kills", functools.partial(process.memory_kills, tmp_path))
    with shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as pub, shmsync.Workers(pub, jobs.apply, 2) as workers:
        kill(workers.procs[0].pid)
        with pytest.raises(shmsync.WorkerDied) as caught:
            pub.publish(wait=True)
        assert "memory" not in str(caught.value)
        file.write_text(KILLS.format(4))
        kill(workers.procs[1].pid)
        with pytest.raises(
            shmsync.WorkerDied, match=r"killed by SIGKILL; .*cgroup killed for lack of memory since its start: 1\)"
        ):
            pub.publish(wait=True)
