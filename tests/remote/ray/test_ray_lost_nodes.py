"""fan_out="node" when a whole node of Ray is lost, and Ray starts its actors on another one."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import AckTimeout, RayWeightSyncScheme, WorkerDied
from support import processes
from support.remote import ray_parts as parts


@pytest.fixture
def cluster():
    """One whose head, where this process is, has no room for the workers."""
    with parts.cluster({}) as made:
        ray.init(made.address, **parts.OPTIONS)
        yield made


def node_of(actor):
    return parts.state.actors(actor._actor_id.hex())["Address"]["NodeID"]


@pytest.mark.full
def test_workers_that_come_back_on_another_node_get_the_next_weights(cluster):
    first = parts.add_node(cluster, {"work": 2})
    scheme = RayWeightSyncScheme(fan_out="node", timeout=60.0)
    actors = parts.start(scheme, 2, resources={"work": 1}, max_restarts=-1)
    scheme.init_on_sender("policy", remote_collectors=actors)
    sender = scheme.get_sender()
    segments = []
    try:
        assert sender.send(parts.net(1.0)) == 1
        before = node_of(actors[0])
        segments = [path for pid in parts.actors_of_class("Relay").values() for path in processes.segments(pid)]
        second = parts.add_node(cluster, {"work": 2})
        cluster.remove_node(first, allow_graceful=False)
        errors = 0
        moved = False  # the processes of a node that is lost live on for a moment, and take weights
        while not moved or errors == 0:  # as a trainer's loop does
            moved = {node_of(actor) for actor in actors} == {second.node_id}
            try:
                version = sender.send(parts.net(2.0), timeout=20.0)
            except (WorkerDied, AckTimeout):
                errors += 1
                moved = False
        assert {node_of(actor) for actor in actors} == {second.node_id} != {before}
        assert parts.ask(actors, "look") == [(2.0, version)] * 2
        assert sender.send(parts.net(3.0)) == version + 1
        assert parts.ask(actors, "look") == [(3.0, version + 1)] * 2
    finally:
        scheme.shutdown()
        for path in segments:  # what the killed relay has left
            path.unlink(missing_ok=True)
