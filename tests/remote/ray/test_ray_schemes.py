"""RayWeightSyncScheme with real actors: what it costs, and what happens when actors die, stop, come and go."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import AckTimeout, RayTransport, RayWeightSyncScheme, WorkerDied
from support import processes
from support.conformance.contexts import Context
from support.processes import until
from support.remote import ray_parts as parts

NBYTES = (parts.SIZE + 1) * parts.SIZE * 4


@pytest.fixture(scope="module", autouse=True)
def crew(one_ray):
    """Two actors that no test kills."""
    return parts.start(RayWeightSyncScheme(), 2)


@pytest.fixture
def starts():
    """starts(...) as parts.start(); they end with the test."""
    started = []

    def begin(*args, **options):
        started.extend(actors := parts.start(*args, **options))
        return actors

    yield begin
    parts.end(started)


def sender_to(actors, **options):
    # With no deadline, only the death of a worker can end a wait for it.
    scheme = RayWeightSyncScheme(**{"timeout": math.inf, **options})
    scheme.init_on_sender("policy", remote_collectors=actors)
    return scheme.get_sender()


def test_constructors_take_what_the_api_says():
    transport = inspect.signature(RayTransport).parameters
    assert list(transport)[:2] == ["remote_collector", "tensor_transport"]
    assert (transport["remote_collector"].default, transport["tensor_transport"].default) == (None, "object_store")
    scheme = inspect.signature(RayWeightSyncScheme).parameters
    assert next(iter(scheme)) == "strategy"
    assert (scheme["strategy"].default, scheme["fan_out"].default) == ("state_dict", None)


def test_a_transport_without_a_collector_does_nothing():
    transport = RayTransport()
    transport.send_weights("policy", {"weight": torch.ones(2)})
    transport.send_weights_async("policy", {"weight": torch.ones(2)})
    transport.wait_ack()
    assert transport.check_connection()
    assert transport.receive_weights(timeout=0) is None


def test_waiting_for_no_send_is_an_error(crew):
    for transport in (RayTransport(), RayTransport(crew[0])):
        with pytest.raises(RuntimeError, match="pending"):
            transport.wait_ack()


def test_a_transport_by_itself_sends_and_waits(crew):
    RayTransport(crew[0]).send_weights("policy", parts.net(3.0).state_dict())
    assert ray.get(crew[0].look.remote())[0] == 3.0


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


def test_a_source_model_is_read_again_at_each_send(crew):
    model = parts.net(1.0)
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender("policy", remote_collectors=crew, source_model=model)
    for version in (1, 2):
        with torch.no_grad():
            model.weight.fill_(version)
            model.bias.fill_(version)
        assert scheme.get_sender().send() == version
        assert parts.ask(crew, "look") == [(float(version), version)] * 2


def test_weights_for_actors_of_this_node_are_not_put_into_the_store(crew):
    sender = sender_to([*crew, None])
    sender.send(parts.net(1.0))
    ((before, _),) = parts.traffic().values()
    for value in (2.0, 3.0, 4.0):
        sender.send(parts.net(value))
    ((after, _),) = parts.traffic().values()
    assert (after - before) / NBYTES < 0.5
    assert parts.ask(crew, "look") == [(4.0, 4)] * 2
    for _, _, path in parts.ask(crew, "given"):
        assert "shmsync-weights" in path


def test_each_send_makes_one_object_whatever_the_number_of_actors(crew, by_the_store):
    sender = sender_to([*crew, None])
    sender.send(parts.net(1.0))
    ((before, _),) = parts.traffic().values()
    for value in (2.0, 3.0, 4.0):
        sender.send(parts.net(value))
    ((after, _),) = parts.traffic().values()
    assert 3 <= (after - before) / NBYTES < 3.5  # the half: Ray's own small objects, and the layout of the weights


def test_actors_get_views_of_the_object_store(crew, by_the_store):
    sender_to(crew).send(parts.net(1.0))
    for _, _, path in parts.ask(crew, "given"):
        assert "plasma" in path
    for _, _, path in parts.ask(crew, "used"):
        assert "plasma" not in path  # the net has a copy of its own


def test_an_exception_of_an_actor_raises_in_the_send_with_its_traceback(crew):
    sender = sender_to(crew)
    sender.send(parts.net(1.0))
    ray.get(crew[0].fail_with.remote(parts.Refusal("no more of this")))
    try:
        with pytest.raises(parts.Refusal, match="no more of this") as caught:
            sender.send(parts.net(2.0))
        assert re.search(r"ray_parts.py.*in update_policy_weights_", str(caught.value.__cause__))
        assert parts.ask(crew, "look") == [(1.0, 1), (2.0, 2)]
    finally:
        ray.get(crew[0].fail_with.remote(None))
    assert sender.send(parts.net(3.0)) == 3
    assert parts.ask(crew, "look") == [(3.0, 3)] * 2


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


def test_actors_killed_before_during_and_between_sends_are_named_and_left_out(starts, tmp_path):
    actors = starts(RayWeightSyncScheme(), 4)
    pids = parts.pids(actors)
    sender = sender_to(actors)
    processes.kill(pids[3])
    with pytest.raises(WorkerDied) as before:
        sender.send(parts.net(1.0))
    assert before.value.missing == [3]
    actors[2].hold.remote(str(tmp_path / "never"))
    sender.send_async(parts.net(2.0))
    processes.kill(pids[2])
    with pytest.raises(WorkerDied, match="worker 2") as during:
        sender.wait_async()
    assert during.value.missing == [2]
    assert sender.send(parts.net(3.0)) == 3
    processes.kill(pids[1])
    with pytest.raises(WorkerDied) as between:
        sender.send(parts.net(4.0))
    assert (between.value.missing, between.value.version) == ([1], 4)
    assert [sender.is_dead(index) for index in range(4)] == [False, True, True, True]
    assert sender.send(parts.net(5.0)) == 5
    assert ray.get(actors[0].look.remote()) == (5.0, 5)
    processes.kill(pids[0])
    with pytest.raises(WorkerDied):
        sender.send(parts.net(6.0))
    with pytest.raises(WorkerDied, match="nothing was sent"):
        sender.send(parts.net(7.0))


def test_a_stopped_actor_is_late_and_its_late_answer_counts_for_nothing(crew):
    sender = sender_to(crew)
    sender.send(parts.net(1.0))
    pid = parts.pids(crew)[1]
    processes.stop(pid)
    try:
        with pytest.raises(AckTimeout, match="worker 1") as late:
            sender.send(parts.net(2.0), timeout=2.0)
        assert (late.value.missing, late.value.version) == ([1], 2)
        sender.send_async(parts.net(3.0))
    finally:
        processes.resume(pid)
    assert sender.wait_async() == 3  # after version 2 was answered, too late
    assert parts.ask(crew, "look") == [(3.0, 3)] * 2


def test_sends_do_not_pile_up_at_a_busy_actor(crew, tmp_path):
    sender = sender_to(crew)
    before = parts.ask(crew, "count")
    held = crew[1].hold.remote(str(tmp_path / "go"))
    for value in range(1, 6):
        with pytest.raises(AckTimeout):
            sender.send(parts.net(float(value)), timeout=0.3)
        assert ray.get(crew[0].look.remote()) == (float(value), value)
    (tmp_path / "go").touch()
    ray.get(held)
    assert sender.send(parts.net(6.0)) == 6
    assert parts.ask(crew, "look") == [(6.0, 6)] * 2
    counts = [now - then for now, then in zip(parts.ask(crew, "count"), before, strict=True)]
    assert counts == [6, 2]  # the first, which waited for it, and the last


def test_an_actor_that_ray_starts_again_is_sent_to_again(starts, tmp_path):
    (actor,) = starts(RayWeightSyncScheme(), max_restarts=1)
    sender = sender_to([actor])
    sender.send(parts.net(1.0))
    pid = ray.get(actor.pid.remote())
    actor.hold.remote(str(tmp_path / "never"))
    sender.send_async(parts.net(2.0))
    processes.kill(pid)
    with pytest.raises(WorkerDied) as caught:
        sender.wait_async()
    assert caught.value.missing == [0]

    def is_back():
        try:
            return ray.get(actor.pid.remote()) != pid
        except ray.exceptions.ActorUnavailableError:
            return False

    until(is_back)
    assert sender.send(parts.net(3.0)) == 3
    assert ray.get(actor.look.remote()) == (3.0, 3)


def test_actors_that_join_and_leave_the_list_are_seen_at_the_next_send(crew, starts):
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
