"""Two nodes of Ray: fetched weights, relays of fan_out="node" and their deaths, a head or a store that is stopped."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import AckTimeout, ProtocolError, RayTransport, RayWeightSyncScheme, WorkerDied
from shmsync.schemes.remote.ray.ray_carrier import on_node
from support import processes
from support.calls import naming
from support.processes import until
from support.remote import fetching
from support.remote import ray_parts as parts
from support.remote.deadlines import overrun

# `make test` sees relays over RPC and torch.distributed (test_node_fan_out.py), and here the only worker of a node. The
# cluster of two nodes takes a minute to come and go.
full = pytest.mark.full
SIZE = 1024
NBYTES = (SIZE + 1) * SIZE * 4
NEAR, FAR = [0, 1], [2, 3, 4, 5]  # the workers of a crew, by node
TIMEOUT, ALLOWED = 0.5, 0.1  # seconds, where a process of Ray's is stopped: of a call, and beyond that


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
def actors(nodes):
    """actors("far", count) -> new ones, which are gone after the test."""
    made = []

    def make(where, count=1):
        new = parts.start(RayWeightSyncScheme(), count, size=SIZE, resources={where: 1})
        made.extend(new)
        return new

    yield make
    parts.end(made)


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


@full
def test_workers_use_the_newest_weights_in_one_slab_of_their_node_which_ends_with_the_scheme(
    crew, scheme_to, relay_pid
):
    scheme = scheme_to(crew)
    for value in (1, 2, 3):
        assert scheme.get_sender().send(model(value)) == value
        assert parts.ask(crew, "look") == everybody(value, value)
    used = parts.ask(crew, "used")
    assert {permissions for permissions, _, _ in used} == {"r--s"}  # no worker can write it
    near, far = ({used[index][1] for index in indices} for indices in (NEAR, FAR))
    assert len(near) == len(far) == 1
    assert near != far
    pid = relay_pid()
    assert processes.segments(pid)
    assert processes.segments(os.getpid())
    for _ in range(2):
        scheme.shutdown()
    until(lambda: not parts.actors_of_class("Relay"))
    until(lambda: not processes.alive(pid))
    assert not processes.segments(pid)
    assert not processes.segments(os.getpid())
    assert parts.ask(crew, "look") == everybody(3, 3)  # they keep what they have


@full
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


@full
def test_a_relay_that_is_late_or_killed_is_named_and_replaced_in_the_same_send(crew, sender_to, relay_pid, nodes):
    sender, relay = sender_to(crew), f"the relay on node {nodes['far']}"
    sender.send(model(1))
    with processes.stopped(relay_pid()):
        with naming(AckTimeout, [*FAR, relay]):
            sender.send(model(2), timeout=3)
        assert parts.ask(crew, "look") == everybody(2, 2, 2) + everybody(1, 1, 4)
        sender.send_async(model(3))
    assert sender.wait_async() == 3
    assert parts.ask(crew, "look") == everybody(3, 3)
    for version, when in ((4, "before a send"), (6, "in a send")):
        pid = relay_pid()
        if when == "before a send":
            processes.kill(pid)
            assert parts.ask(crew, "look") == everybody(version - 1, version - 1)  # what it had published goes on
            sender.send_async(model(version))
        else:
            processes.stop(pid)  # so that it has the weights, and no time to publish them
            sender.send_async(model(version))
            processes.kill(pid)
        with naming(WorkerDied, [relay], match=relay) as caught:
            sender.wait_async()
        assert caught.value.version == version
        assert parts.ask(crew, "look") == everybody(version, version)
        assert sender.send(model(version + 1)) == version + 1
        assert parts.ask(crew, "look") == everybody(version + 1, version + 1)
    relay_pid()


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


@full
def test_a_trainer_that_ends_without_shutdown_leaves_no_arena_of_its_relays():
    script = FORGETFUL.replace("ADDRESS", ray.get_runtime_context().gcs_address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout.split()[-1])
    until(lambda: not processes.alive(pid))
    assert processes.segments(pid) == []


@full
def test_two_schemes_may_share_actors_in_turn_and_plain_weights_for_them_are_refused(crew, sender_to):
    first, second, plain = sender_to(crew), sender_to(crew), sender_to(crew, fan_out=None)
    for version in (1, 2):
        for sender, value in ((first, version), (second, -version)):
            assert sender.send(model(value)) == version
            assert parts.ask(crew, "look") == everybody(value, version)
    with pytest.raises(ProtocolError, match='fan_out="node"'):
        plain.send(model(9))
    assert parts.ask(crew, "look") == everybody(-2, 2)
    assert first.send(model(3)) == 3
    assert parts.ask(crew, "look") == everybody(3, 3)


# ---- weights that are fetched from the trainer


@full  # test_fetched_weights.py has the same over RPC and torch.distributed
def test_actors_fetch_weights_or_get_them_by_the_object_store_where_they_cannot(actors, sender_to, caplog):
    crew = actors("near", 2) + actors("far")
    sender = sender_to(crew, fan_out=None)
    for value in (1, 2):
        assert sender.send(model(value)) == value
        assert parts.ask(crew, "look") == everybody(value, value, 3)
    (permissions, _, path), _, other = parts.ask(crew, "given")
    assert permissions == "r--s" and "shmsync-weights" in path  # where they lie
    assert "plasma" not in other[2] and "/dev/shm" not in other[2]
    fetching.block_the_port(None)
    with caplog.at_level("WARNING", "shmsync"):
        for value in (3, 4):
            assert sender.send(model(value)) == value
            assert parts.ask(crew, "look") == everybody(value, value, 3)
    told = sorted(record.getMessage()[:40] for record in caplog.records)
    assert [line.startswith(f"worker {index} cannot fetch weights") for index, line in enumerate(told)] == [True] * 3


def relays_in(actor):
    return ray.get(actor.__ray_call__.remote(fetching.relays_here))


def test_the_only_actor_of_a_node_needs_no_relay_until_a_second_one_brings_it(actors, scheme_to):
    crew = actors("far")
    (pid,) = parts.pids(crew)
    scheme = scheme_to(crew)
    for value in (1, 2):
        assert scheme.get_sender().send(model(value)) == value
        assert parts.ask(crew, "look") == everybody(value, value, 1)
    assert not parts.actors_of_class("Relay") and relays_in(crew[0]) == 1
    assert processes.segments(pid)
    scheme.shutdown()
    until(lambda: not processes.segments(pid))
    assert parts.ask(crew, "look") == everybody(2, 2, 1)  # it keeps what it has
    sender = scheme_to(crew).get_sender()
    assert sender.send(model(3)) == 1
    crew += actors("far")
    for version in (2, 3):
        assert sender.send(model(version)) == version
        assert parts.ask(crew, "look") == everybody(version, version, 2)
    assert len(parts.actors_of_class("Relay")) == 1
    assert relays_in(crew[0]) == 0  # it has ended its own
    assert len({inode for _, inode, _ in parts.ask(crew, "used")}) == 1
    crew.pop()
    assert sender.send(model(4)) == 4
    assert parts.ask(crew, "look") == everybody(4, 4, 1)


# ---- when a process of Ray's is stopped, no call outlives its deadline by more than a tenth of a second


def stopped(which):
    return processes.stopped(parts.head_pid() if which == "the head" else parts.store_pid())


def in_halves(sender):
    with contextlib.suppress(AckTimeout):
        sender.send_async(model(1), timeout=TIMEOUT)
    sender.wait_async(timeout=TIMEOUT)


@full
@pytest.mark.parametrize(
    ("which", "fan_out", "first"),
    [("the head", "node", True), ("the object store", None, False)],
    ids=["the head, the first send", "the object store, a later one"],
)
def test_a_stopped_process_of_ray(actors, sender_to, which, fan_out, first):
    crew = actors("near") + actors("far")
    sender, transport = sender_to(crew, fan_out=fan_out), RayTransport(crew[0])
    if not first:
        sender.send(model(1))
    with stopped(which):
        if first:  # the sender knows no worker's node yet
            with naming(AckTimeout, [0, 1]):
                sender.send(model(1), timeout=TIMEOUT)
        assert overrun(lambda: sender.send(model(1), timeout=TIMEOUT), TIMEOUT) < ALLOWED
        assert overrun(lambda: in_halves(sender), 2 * TIMEOUT) < ALLOWED
        if fan_out is None:
            weights = model(1).state_dict()
            assert overrun(lambda: transport.send_weights("policy", weights, timeout=TIMEOUT), TIMEOUT) < ALLOWED
        pid = parts.head_pid() if which == "the head" else parts.store_pid()
        soon = threading.Timer(1.0, processes.resume, [pid])
        soon.start()
        version = sender.send(model(7))  # which has no deadline, and waits for Ray
    soon.join()
    assert parts.ask(crew, "look") == everybody(7, version, 2)
    transport.close()


@full
def test_weights_that_the_store_does_not_take_name_those_who_miss_them(actors, sender_to, by_the_store):
    sender = sender_to(actors("near") + actors("far"), fan_out=None)
    with stopped("the object store"):
        for missing in ([0, 1], [1]):
            with naming(AckTimeout, missing):
                sender.send(model(1), missing, timeout=TIMEOUT)


@full
def test_a_relay_that_the_stopped_head_cannot_start(actors, scheme_to, nodes):
    scheme = scheme_to(actors("near") + actors("far", 2))
    sender = scheme.get_sender()
    with stopped("the head"):
        for worker, node in zip(sender._transports.values(), ("near", "far", "far"), strict=True):
            worker.location = on_node(nodes[node])
        assert overrun(lambda: sender.send(model(1), timeout=TIMEOUT), TIMEOUT) < ALLOWED
        assert overrun(scheme.shutdown, 2.0, tries=1) < ALLOWED
    until(lambda: "shmsync executor" not in [thread.name for thread in threading.enumerate()])
