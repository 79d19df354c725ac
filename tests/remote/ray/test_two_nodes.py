"""fan_out="node" between two nodes of Ray: what workers share, and relays that die or are late."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import AckTimeout, RayWeightSyncScheme, WorkerDied
from support import processes
from support.calls import naming
from support.processes import until
from support.remote import ray_parts as parts

pytestmark = pytest.mark.slow  # Ray starts for a minute; one node is in test_node_fan_out.py

SIZE = 1024
NEAR, FAR = [0], [1, 2]  # the workers of a crew, by node


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


def everybody(value, version, count=3):
    return [(float(value), version)] * count


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


def test_a_relay_that_is_late_or_killed_is_named_and_replaced_in_the_same_send(crew, scheme_to, relay_pid, nodes):
    sender, relay = scheme_to(crew).get_sender(), f"the relay on node {nodes['far']}"
    sender.send(model(1))
    with processes.stopped(relay_pid()):
        with naming(AckTimeout, [*FAR, relay]):
            sender.send(model(2), timeout=3)
        assert parts.ask(crew, "look") == everybody(2, 2, 1) + everybody(1, 1, 2)
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


def test_a_trainer_that_ends_without_shutdown_leaves_no_arena_of_its_relays():
    script = FORGETFUL.replace("ADDRESS", ray.get_runtime_context().gcs_address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout.split()[-1])
    until(lambda: not processes.alive(pid))
    assert processes.segments(pid) == []


# ---- when a process of Ray's is stopped, no call outlives its deadline by more than a tenth of a second
