"""fan_out="node" when a whole node of Ray is lost, and Ray starts its actors on another one."""

from __future__ import annotations

import logging
import shutil

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray
from ray.cluster_utils import Cluster

from shmsync import AckTimeout, RayWeightSyncScheme, WorkerDied
from support import processes
from support.remote import ray_parts as parts
from support.remote.one_ray import instead_of_the_last


@pytest.fixture
def cluster():
    """One whose head, where this process is, has no room for the workers."""
    instead_of_the_last(ray.shutdown)
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 1, "object_store_memory": 100 << 20, "_system_config": parts.SYSTEM}
    made = Cluster(initialize_head=True, head_node_args=head)
    session = made.head_node.get_session_dir_path()
    try:
        ray.init(made.address, **parts.OPTIONS)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def add_node(cluster):
    return cluster.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"work": 2})


def node_of(actor):
    return parts.state.actors(actor._actor_id.hex())["Address"]["NodeID"]


@pytest.mark.full
def test_workers_that_come_back_on_another_node_get_the_next_weights(cluster):
    first = add_node(cluster)
    scheme = RayWeightSyncScheme(fan_out="node", timeout=60.0)
    actors = parts.start(scheme, 2, resources={"work": 1}, max_restarts=-1)
    scheme.init_on_sender("policy", remote_collectors=actors)
    sender = scheme.get_sender()
    segments = []
    try:
        assert sender.send(parts.net(1.0)) == 1
        before = node_of(actors[0])
        segments = [path for pid in parts.actors_of_class("Relay").values() for path in processes.segments(pid)]
        second = add_node(cluster)
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
