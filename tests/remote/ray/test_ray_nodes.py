"""fan_out="node" for Ray: two of the actors are on another node, by SHMSYNC_NODE."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from shmsync import RayWeightSyncScheme, WorkerDied
from support import processes
from support.calls import naming
from support.remote import ray_parts as parts

pytestmark = pytest.mark.slow


def test_one_worker_of_another_node_publishes_for_it_and_another_one_when_it_died(one_ray):
    crew = parts.crew(RayWeightSyncScheme(), ["", "far", "far", "far"])
    scheme = RayWeightSyncScheme(fan_out="node", timeout=math.inf)
    scheme.init_on_sender("policy", remote_collectors=crew)
    sender = scheme.get_sender()
    for value in (1, 2):
        assert sender.send(parts.net(value)) == value
        assert parts.ask(crew, "look") == [(float(value), value)] * 4
    used = parts.ask(crew, "used")
    assert {permissions for permissions, _, _ in used} == {"r--s"}
    assert used[0][1] != used[1][1] and len({inode for _, inode, _ in used[1:]}) == 1
    leader = parts.kill_one(crew[1])
    with naming(WorkerDied, [1]):
        sender.send(parts.net(3))
    processes.remove_segments(leader)
    left = [crew[0], *crew[2:]]
    for value in (4, 5):
        assert sender.send(parts.net(value)) == value
        assert parts.ask(left, "look") == [(float(value), value)] * 3
    scheme.shutdown()
