"""fan_out="node" on two nodes of Ray: one copy crosses to each, its workers share it, and relays may die."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import AckTimeout, ProtocolError, RayWeightSyncScheme, WorkerDied
from support import processes
from support.calls import naming
from support.processes import until
from support.remote import ray_parts as parts

# `make test` sees relays over RPC and torch.distributed (test_node_fan_out.py), and over Ray in
# test_ray_fetched_weights.py: a cluster of two nodes takes a minute to come and go.
pytestmark = pytest.mark.full
SIZE = 1024
NBYTES = (SIZE + 1) * SIZE * 4
NEAR, FAR = [0, 1], [2, 3, 4, 5]  # the workers of a crew, by node


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with parts.two_nodes() as ids:
        yield ids


@pytest.fixture(scope="module")
def crew(nodes):
    """Actors that no test kills: those of this process's node first."""
    near, far = ({"resources": {name: 1}, "size": SIZE} for name in ("near", "far"))
    return parts.start(RayWeightSyncScheme(), len(NEAR), **near) + parts.start(RayWeightSyncScheme(), len(FAR), **far)


@pytest.fixture
def scheme_to():
    """scheme_to(actors) -> a scheme with fan-out; without a deadline, so that only a death ends a wait for the dead."""
    made, before = [], parts.actors_of_class("Relay").keys()

    def make(actors, **options):
        made.append(scheme := RayWeightSyncScheme(**{"fan_out": "node", "timeout": math.inf, **options}))
        scheme.init_on_sender("policy", remote_collectors=actors)
        return scheme

    yield make
    for scheme in made:
        scheme.shutdown()
    until(lambda: parts.actors_of_class("Relay").keys() <= before)


@pytest.fixture
def sender_to(scheme_to):
    return lambda actors, **options: scheme_to(actors, **options).get_sender()


@pytest.fixture
def relay_pid(nodes):
    """relay_pid() -> of the only relay that there is. What it leaves when it is killed is removed."""
    found = []

    def find():
        (pid,) = parts.actors_of_class("Relay").values()
        found.append(pid)
        return found[-1]

    yield find
    for pid in found:
        processes.remove_segments(pid)


def model(value):
    return parts.net(value, SIZE)


def everybody(value, version, count=6):
    return [(float(value), version)] * count


def test_every_worker_uses_the_newest_weights_in_one_slab_of_its_node_that_it_cannot_write(crew, sender_to):
    sender = sender_to(crew)
    for value in (1, 2, 3):
        assert sender.send(model(value)) == value
        assert parts.ask(crew, "look") == everybody(value, value)
    used = parts.ask(crew, "used")
    assert {permissions for permissions, _, _ in used} == {"r--s"}
    near, far = ({used[index][1] for index in indices} for indices in (NEAR, FAR))
    assert len(near) == len(far) == 1
    assert near != far


def test_one_copy_crosses_to_a_node(nodes, crew, sender_to):
    """By Ray's own count of what its stores get from each other.

    Ray itself moves an object to a node once, however many actors ask for it there: without fan-out one object for all
    workers crosses once. With fan-out the relay fetches the weights past Ray, and nothing crosses in its stores. An
    object for each worker, as TorchRL makes them, crosses once for each.
    """

    def crossed(send):
        before = parts.traffic()[nodes["far"]][1]
        send()
        return (parts.traffic()[nodes["far"]][1] - before) / NBYTES

    def put_for_each():
        weights = model(3).state_dict()
        ray.get([actor.update_policy_weights_.remote(policy_or_weights=ray.put(weights)) for actor in crew])

    with_fan_out = sender_to(crew)
    with_fan_out.send(model(1))  # the first one starts the relay
    ray.get([actor.ignore.remote(True) for actor in crew])  # an actor with shared weights takes no others
    try:
        without = sender_to(crew, fan_out=None)
        copies = [
            crossed(lambda: with_fan_out.send(model(2))),
            crossed(lambda: without.send(model(2))),
            crossed(put_for_each),
        ]
    finally:
        ray.get([actor.ignore.remote(False) for actor in crew])
    assert [math.floor(count) for count in copies] == [0, 1, len(FAR)]
    assert all(count - math.floor(count) < 0.2 for count in copies)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_relay_is_named_and_replaced_in_the_same_send(crew, sender_to, relay_pid, nodes, when):
    sender = sender_to(crew)
    sender.send(model(1))
    pid = relay_pid()
    if when == "before":
        processes.kill(pid)
        assert parts.ask(crew, "look") == everybody(1, 1)  # what it had published goes on
        sender.send_async(model(2))
    else:
        processes.stop(pid)  # so that it has the weights, and no time to publish them
        sender.send_async(model(2))
        processes.kill(pid)
    with naming(WorkerDied, [f"the relay on node {nodes['far']}"], match=f"the relay on node {nodes['far']}") as caught:
        sender.wait_async()
    assert caught.value.version == 2
    assert parts.ask(crew, "look") == everybody(2, 2)
    relay_pid()
    assert sender.send(model(3)) == 3
    assert parts.ask(crew, "look") == everybody(3, 3)


def test_a_stopped_relay_is_late_with_its_workers(crew, sender_to, relay_pid, nodes):
    sender = sender_to(crew)
    sender.send(model(1))
    with processes.stopped(relay_pid()):
        with naming(AckTimeout, [*FAR, f"the relay on node {nodes['far']}"]):
            sender.send(model(2), timeout=3)
        assert parts.ask(crew, "look") == everybody(2, 2, 2) + everybody(1, 1, 4)
        sender.send_async(model(3))
    assert sender.wait_async() == 3
    assert parts.ask(crew, "look") == everybody(3, 3)


def test_shutdown_ends_the_relays_and_leaves_no_arena(crew, scheme_to, relay_pid):
    scheme = scheme_to(crew)
    scheme.get_sender().send(model(1))
    pid = relay_pid()
    assert processes.segments(pid)
    assert processes.segments(os.getpid())
    for _ in range(2):
        scheme.shutdown()
    until(lambda: not parts.actors_of_class("Relay"))
    until(lambda: not processes.alive(pid))
    assert not processes.segments(pid)
    assert not processes.segments(os.getpid())
    assert parts.ask(crew, "look") == everybody(1, 1)  # they keep what they have


FORGETFUL = """
import shmsync.schemes  # and torch with it, before Ray
import ray
from support.remote import ray_parts as parts
from shmsync import RayWeightSyncScheme

ray.init("ADDRESS", **parts.OPTIONS)
scheme = RayWeightSyncScheme(fan_out="node")
scheme.init_on_sender("policy", remote_collectors=parts.start(RayWeightSyncScheme(), 2, resources={"far": 1}))
scheme.get_sender().send(parts.net(1.0))
print(*parts.actors_of_class("Relay").values())
"""


def test_a_trainer_that_ends_without_shutdown_leaves_no_arena_of_its_relays():
    script = FORGETFUL.replace("ADDRESS", ray.get_runtime_context().gcs_address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout.split()[-1])
    until(lambda: not processes.alive(pid))
    assert processes.segments(pid) == []


def test_two_schemes_may_send_to_the_same_actors_in_turn(crew, sender_to):
    first, second = sender_to(crew), sender_to(crew)
    for version in (1, 2):
        for sender, value in ((first, version), (second, -version)):
            assert sender.send(model(value)) == version
            assert parts.ask(crew, "look") == everybody(value, version)


def test_plain_weights_for_a_worker_that_shares_are_refused(crew, sender_to):
    sharing, plain = sender_to(crew), sender_to(crew, fan_out=None)
    sharing.send(model(1))
    with pytest.raises(ProtocolError, match='fan_out="node"'):
        plain.send(model(2))
    assert parts.ask(crew, "look") == everybody(1, 1)
    assert sharing.send(model(3)) == 2
    assert parts.ask(crew, "look") == everybody(3, 2)


def test_a_send_does_not_wait_for_rays_head_beyond_its_deadline(crew, sender_to):
    sender = sender_to(crew)  # which knows no worker's node yet
    head = parts.head_pid()
    with processes.stopped(head):
        with naming(AckTimeout, list(range(6))):
            sender.send(model(1), timeout=1.0)
        soon = threading.Timer(1.0, processes.resume, [head])
        soon.start()
        version = sender.send(model(2))  # which has no deadline, and waits for the head
    soon.join()
    assert parts.ask(crew, "look") == everybody(2, version)
