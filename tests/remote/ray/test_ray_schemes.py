"""RayWeightSyncScheme with real actors: its arguments, and actors that come and go."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from shmsync import AckTimeout, RayWeightSyncScheme
from support import processes
from support.calls import naming
from support.conformance.contexts import Context
from support.remote import ray_parts as parts
from support.remote.deadlines import overrun


def sender_to(actors, **options):
    # With no deadline, only the death of a worker can end a wait for it.
    scheme = RayWeightSyncScheme(**{"timeout": math.inf, **options})
    scheme.init_on_sender("policy", remote_collectors=actors)
    return scheme.get_sender()


def test_an_actor_that_is_registered_beside_the_list_is_refused(crew):
    with pytest.raises(ValueError, match="put this one into that list"):
        sender_to(crew).register_worker(2, crew[0])


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


@pytest.mark.slow
def test_a_stopped_head_of_ray_holds_no_call_beyond_its_deadline(one_ray):
    crew = parts.start(RayWeightSyncScheme(), 2)  # their models are bound to an arena from here on
    sender = sender_to(crew, fan_out="node")
    with processes.stopped(parts.head_pid()):
        with naming(AckTimeout, [0, 1]):
            sender.send(parts.net(1.0), timeout=0.5)
        assert overrun(lambda: sender.send(parts.net(1.0), timeout=0.5), 0.5) < 0.1
    version = sender.send(parts.net(7.0))
    assert parts.ask(crew, "look") == [(7.0, version)] * 2
    parts.end(crew)
