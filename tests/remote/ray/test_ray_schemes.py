"""RayWeightSyncScheme with real actors: what it costs, and what happens when actors die, stop, come and go."""

from __future__ import annotations

import inspect
import math

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import RayActorTransport, RayModuleTransformScheme, RayTransport, RayWeightSyncScheme, WorkerDied
from support import processes
from support.calls import naming
from support.conformance.contexts import Context
from support.processes import until
from support.remote import ray_parts as parts


@pytest.fixture(scope="module", autouse=True)
def crew(one_ray):
    """Two actors that no test kills."""
    return parts.start(RayWeightSyncScheme(), 2)


def sender_to(actors, **options):
    # With no deadline, only the death of a worker can end a wait for it.
    scheme = RayWeightSyncScheme(**{"timeout": math.inf, **options})
    scheme.init_on_sender("policy", remote_collectors=actors)
    return scheme.get_sender()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (RayTransport, {"remote_collector": None, "tensor_transport": "object_store"}),
        (RayWeightSyncScheme, {"strategy": "state_dict"}),
        (RayActorTransport, {"actor_ref": None, "update_method": "tensordict", "tensor_transport": "object_store"}),
        (RayModuleTransformScheme, {"strategy": "tensordict"}),
    ],
)
def test_constructors_take_what_the_api_says(make, expected):
    parameters = list(inspect.signature(make).parameters.values())
    assert [(each.name, each.default) for each in parameters[: len(expected)]] == list(expected.items())


@pytest.mark.parametrize("count", ["num_workers", "num_collectors"])
def test_actors_come_from_a_context_or_from_keywords(crew, count):
    context = Context(remote_collectors=crew, **{count: 2})
    for value, given in ((1.0, {"context": context}), (2.0, {"remote_collectors": crew, count: 2})):
        scheme = RayWeightSyncScheme()
        scheme.init_on_sender("policy", **given)
        assert scheme.get_sender().worker_ids == [0, 1]
        assert scheme.get_sender().send(parts.net(value)) == 1
        assert parts.ask(crew, "look") == [(value, 1)] * 2


def test_an_actor_that_is_registered_beside_the_list_is_refused(crew):
    with pytest.raises(ValueError, match="put this one into that list"):
        sender_to(crew).register_worker(2, crew[0])


@pytest.mark.parametrize("count", ["num_workers", "num_collectors"])
def test_counts_that_contradict_the_actors_are_refused(crew, count):
    for given in ({"context": Context(remote_collectors=crew, **{count: 3})}, {"remote_collectors": crew, count: 3}):
        with pytest.raises(ValueError, match=f"{count} is 3 but there are 2"):
            RayWeightSyncScheme().init_on_sender("policy", **given)
    with pytest.raises(ValueError, match="remote_collectors"):
        RayWeightSyncScheme().init_on_sender("policy", **{count: 2})


def test_weights_for_actors_of_this_node_are_not_put_into_the_store(crew):
    sender = sender_to([*crew, None])
    assert parts.objects_of_three(sender.send) < 0.5
    assert parts.ask(crew, "look") == [(4.0, 4)] * 2
    for _, _, path in parts.ask(crew, "given"):
        assert "shmsync-weights" in path


def test_each_send_makes_one_object_of_which_all_actors_get_views(crew, by_the_store):
    sender = sender_to([*crew, None])
    assert 3 <= parts.objects_of_three(sender.send) < 3.5
    for _, _, path in parts.ask(crew, "given"):
        assert "plasma" in path
    for _, _, path in parts.ask(crew, "used"):
        assert "plasma" not in path  # the net has a private copy


def test_an_exception_that_cannot_be_rebuilt_here_is_no_death(crew):
    sender = sender_to(crew)
    ray.get(crew[0].fail_strangely.remote())
    try:
        with pytest.raises(RuntimeError, match="strange 1 2") as caught:
            sender.send(parts.net(1.0))
        assert "in update_policy_weights_" in str(caught.value.__cause__)
        assert not sender.is_dead(0)
    finally:
        ray.get(crew[0].fail_with.remote(None))
    assert sender.send(parts.net(2.0)) == 2
    assert parts.ask(crew, "look") == [(2.0, 2)] * 2


@pytest.mark.full  # Ray takes 15 s to start an actor again; one that the user starts again is in conformance/trouble
def test_an_actor_that_ray_starts_again_is_sent_to_again(tmp_path):
    (actor,) = parts.start(RayWeightSyncScheme(), max_restarts=1)
    sender = sender_to([actor])
    sender.send(parts.net(1.0))
    pid = ray.get(actor.pid.remote())
    actor.hold.remote(str(tmp_path / "never"))
    sender.send_async(parts.net(2.0))
    processes.kill(pid)
    with naming(WorkerDied, [0]):
        sender.wait_async()

    def is_back():
        try:
            return ray.get(actor.pid.remote()) != pid
        except ray.exceptions.ActorUnavailableError:
            return False

    until(is_back)
    assert sender.send(parts.net(3.0)) == 3
    assert ray.get(actor.look.remote()) == (3.0, 3)
    parts.end([actor])


def test_actors_that_join_and_leave_the_list_are_seen_at_the_next_send(crew):
    for given in ("a list", "a context"):
        roster = [crew[0]]
        context = Context(remote_collectors=roster)
        scheme = RayWeightSyncScheme()
        scheme.init_on_sender(
            "policy", **({"remote_collectors": roster} if given == "a list" else {"context": context})
        )
        sender = scheme.get_sender()
        sender.send(parts.net(1.0))
        roster.append(crew[1])
        sender.send(parts.net(2.0))
        assert parts.ask(crew, "look") == [(2.0, 2)] * 2
        del roster[0]
        sender.send(parts.net(3.0))
        assert sender.worker_ids == [0]
        assert parts.ask(crew, "look") == [(2.0, 2), (3.0, 3)]
