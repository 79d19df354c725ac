"""No call over Ray outlives its deadline by more than a tenth of a second when a process of Ray's is stopped."""

from __future__ import annotations

import contextlib
import threading

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from shmsync import AckTimeout, RayTransport, RayWeightSyncScheme
from shmsync.schemes.remote.ray.ray_carrier import on_node
from support import processes
from support.calls import naming
from support.choice import first
from support.processes import until
from support.remote import ray_parts as parts
from support.remote.deadlines import overrun

ALLOWED = 0.1
TIMEOUT = 0.5


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with parts.two_nodes() as ids:
        yield ids


@pytest.fixture
def crew(nodes):
    near, far = ({"resources": {name: 1}} for name in ("near", "far"))
    made = parts.start(RayWeightSyncScheme(), 1, **near) + parts.start(RayWeightSyncScheme(), 1, **far)
    yield made
    parts.end(made)


def stopped(which):
    return processes.stopped(parts.head_pid() if which == "the head" else parts.store_pid())


def in_halves(sender):
    with contextlib.suppress(AckTimeout):
        sender.send_async(parts.net(1.0), timeout=TIMEOUT)
    sender.wait_async(timeout=TIMEOUT)


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False], ids=["the first send", "a later one"])
@pytest.mark.parametrize("fan_out", [None, "node"])
@pytest.mark.parametrize("which", ["the head", "the object store"])
def test_a_stopped_process_of_ray(crew, which, fan_out, first):
    scheme = RayWeightSyncScheme(fan_out=fan_out)
    scheme.init_on_sender("policy", remote_collectors=crew)
    sender = scheme.get_sender()
    transport = RayTransport(crew[0])
    try:
        if not first:
            sender.send(parts.net(1.0))
        with stopped(which):
            assert overrun(lambda: sender.send(parts.net(1.0), timeout=TIMEOUT), TIMEOUT) < ALLOWED
            assert overrun(lambda: in_halves(sender), 2 * TIMEOUT) < ALLOWED
            if fan_out is None:
                weights = parts.net(1.0).state_dict()
                assert overrun(lambda: transport.send_weights("policy", weights, timeout=TIMEOUT), TIMEOUT) < ALLOWED
        while True:
            with contextlib.suppress(AckTimeout):
                version = sender.send(parts.net(7.0), timeout=30.0)
                break
        assert parts.ask(crew, "look") == [(7.0, version)] * 2
    finally:
        scheme.shutdown()
        transport.close()


@pytest.mark.full  # a cluster with a small store of its own
@pytest.mark.parametrize("kwargs", first([{}, {"worker_ids": [1]}]), ids=["all", "some"])
def test_weights_that_the_store_does_not_take_name_those_who_miss_them(crew, kwargs, by_the_store):
    with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", remote_collectors=crew)
        sender = scheme.get_sender()
        with stopped("the object store"), naming(AckTimeout, kwargs.get("worker_ids", [0, 1])):
            sender.send(parts.net(1.0), timeout=TIMEOUT, **kwargs)


@pytest.mark.full
def test_a_relay_that_the_stopped_head_cannot_start(crew, nodes):
    scheme = RayWeightSyncScheme(fan_out="node")
    scheme.init_on_sender("policy", remote_collectors=crew)
    sender = scheme.get_sender()
    try:
        with stopped("the head"):
            for worker, node in zip(sender._transports.values(), ("near", "far"), strict=True):
                worker.location = on_node(nodes[node])
            assert overrun(lambda: sender.send(parts.net(1.0), timeout=TIMEOUT), TIMEOUT) < ALLOWED
            assert overrun(scheme.shutdown, 2.0, tries=1) < ALLOWED
    finally:
        scheme.shutdown()
        until(lambda: "shmsync executor" not in [thread.name for thread in threading.enumerate()])
