"""Large weights for actors of Ray, fetched from the trainer, and nodes of Ray that have one worker."""

from __future__ import annotations

import math

import pytest

from support.choice import first

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import RayWeightSyncScheme, WorkerDied
from support import processes
from support.calls import naming
from support.processes import until
from support.remote import fetching
from support.remote import ray_parts as parts

SIZE = 1024  # 4 MB


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with parts.two_nodes() as ids:
        yield ids


@pytest.fixture
def actors():
    """actors("far", count) -> new ones, which are gone after the test."""
    made = []

    def make(where, count=1, size=SIZE):
        new = parts.start(RayWeightSyncScheme(), count, size=size, resources={where: 1})
        made.extend(new)
        return new

    yield make
    parts.end(made)


@pytest.fixture
def sender_to():
    made = []

    def make(actors, **options):
        made.append(scheme := RayWeightSyncScheme(**{"timeout": math.inf, **options}))
        scheme.init_on_sender("policy", remote_collectors=actors)
        return scheme.get_sender()

    yield make
    for scheme in made:
        scheme.shutdown()
    until(lambda: not parts.actors_of_class("Relay"))


def model(value):
    return parts.net(value, SIZE)


def relays_in(actor):
    return ray.get(actor.__ray_call__.remote(fetching.relays_here))


@pytest.mark.full  # test_fetched_weights.py has the same over RPC and torch.distributed
def test_actors_beside_the_trainer_read_weights_where_they_lie_and_one_elsewhere_fetches_them(actors, sender_to):
    near, far = actors("near"), actors("far")
    sender = sender_to([*near, *far])
    for value in (1, 2, 3, 4):
        assert sender.send(model(value)) == value
        assert parts.ask([*near, *far], "look") == [(float(value), value)] * 2
    (permissions, _, path), other = parts.ask([*near, *far], "given")
    assert permissions == "r--s" and "shmsync-weights" in path
    assert "plasma" not in other[2] and "/dev/shm" not in other[2]


@pytest.mark.full  # test_fetched_weights.py has a worker that cannot fetch over RPC
def test_actors_that_cannot_reach_the_trainer_get_them_by_the_object_store(actors, sender_to, caplog):
    crew = actors("near", 2) + actors("far")
    sender = sender_to(crew)
    sender.send(model(1))
    fetching.block_the_port(None)
    with caplog.at_level("WARNING", "shmsync"):
        for value in (2, 3):
            assert sender.send(model(value)) == value
            assert parts.ask(crew, "look") == [(float(value), value)] * 3
    told = sorted(record.getMessage()[:40] for record in caplog.records)
    assert [line.startswith(f"worker {index} cannot fetch weights") for index, line in enumerate(told)] == [True] * 3


@pytest.mark.full  # test_fetched_weights.py has the only worker of a node over RPC and torch.distributed
def test_the_only_actor_of_a_node_needs_no_relay_and_a_second_one_brings_it(actors, sender_to):
    crew = actors("far")
    sender = sender_to(crew, fan_out="node")
    for value in (1, 2):
        assert sender.send(model(value)) == value
        assert parts.ask(crew, "look") == [(float(value), value)]
    assert not parts.actors_of_class("Relay") and relays_in(crew[0]) == 1
    crew += actors("far")
    for value in (3, 4):
        assert sender.send(model(value)) == value
        assert parts.ask(crew, "look") == [(float(value), value)] * 2
    assert len(parts.actors_of_class("Relay")) == 1
    assert relays_in(crew[0]) == 0  # it has ended its own
    assert len({inode for _, inode, _ in parts.ask(crew, "used")}) == 1
    crew.pop()
    assert sender.send(model(5)) == 5
    assert parts.ask(crew, "look") == [(5.0, 5)]


def test_the_only_actor_of_a_node_ends_its_arena_with_the_scheme(actors, sender_to):
    crew = actors("far")
    scheme = RayWeightSyncScheme(fan_out="node")
    scheme.init_on_sender("policy", remote_collectors=crew)
    scheme.get_sender().send(model(1))
    assert processes.segments(parts.pids(crew)[0])
    scheme.shutdown()
    until(lambda: not processes.segments(parts.pids(crew)[0]))
    assert parts.ask(crew, "look") == [(1.0, 1)]  # it keeps what it has


@pytest.mark.full  # conformance/trouble kills an actor in each step of a send
@pytest.mark.parametrize("where", first(["far", "near"]))
@pytest.mark.parametrize("fan_out", first(["node", None]))
def test_an_actor_that_is_killed_with_weights_under_way_is_named(actors, sender_to, tmp_path, where, fan_out):
    crew = actors("near") + actors(where)
    sender = sender_to(crew, fan_out=fan_out)
    sender.send(model(1))
    (_, pid) = parts.pids(crew)
    crew[1].hold.remote(str(tmp_path / "never"))
    sender.send_async(model(2))
    processes.kill(pid)
    with naming(WorkerDied, [1]):
        sender.wait_async()
    assert parts.ask(crew[:1], "look") == [(2.0, 2)]
    assert sender.send(model(3)) == 3
    assert parts.ask(crew[:1], "look") == [(3.0, 3)]
    until(lambda: fetching.kept_packed(None) == 0)
    processes.remove_segments(pid)
