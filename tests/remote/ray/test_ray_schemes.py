"""RayWeightSyncScheme with real actors: what it costs, and what happens when actors die, stop, come and go."""

from __future__ import annotations

import inspect
import math

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")


from shmsync import RayActorTransport, RayModuleTransformScheme, RayTransport, RayWeightSyncScheme
from support.conformance.contexts import Context
from support.remote import ray_parts as parts


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
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender("policy", Context(remote_collectors=crew, **{count: 2}))
    assert scheme.get_sender().worker_ids == [0, 1]


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
