"""RayWeightSyncScheme with real actors: what a send promises, and actors that are late or stopped.

One is killed in test_ray_updaters.py, whose tests come last: an actor in its place takes seconds to start.
"""

from __future__ import annotations

import math

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray
import torch

from shmsync import AckTimeout, ManifestMismatch, RayWeightSyncScheme
from support import processes
from support.calls import naming
from support.conformance.contexts import Context
from support.remote import ray_parts as parts


def sender_to(actors, **options):
    # With no deadline, only the death of a worker can end a wait for it.
    scheme = RayWeightSyncScheme(**{"timeout": math.inf, **options})
    scheme.init_on_sender("policy", remote_collectors=actors)
    return scheme.get_sender()


@pytest.mark.parametrize("fan_out", [None, "node"])
def test_a_send_returns_when_all_have_applied_it_or_raises_an_error_that_names_who_has_not(crew, fan_out, tmp_path):
    sender = sender_to(crew, fan_out=fan_out)
    assert [sender.send(parts.net(5.0)), sender.send(parts.net(6.0).state_dict())] == [1, 2]
    assert parts.ask(crew, "look") == [(6.0, 2)] * 2
    assert sender.send_async(parts.net(7.0)) == 3
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        sender.send(parts.net(8.0))
    assert sender.wait_async() == 3
    with pytest.raises(ManifestMismatch, match="bias"):
        sender.send({**parts.net(8.0).state_dict(), "bias": torch.zeros(3)})
    assert [value for value, _ in parts.ask(crew, "look")] == [7.0] * 2
    held = crew[1].hold.remote(str(tmp_path / "go"))
    sender.send_async(parts.net(9.0))
    processes.until(lambda: parts.ask(crew[:1], "look")[0][0] == 9.0)
    with naming(AckTimeout, [1]):
        sender.wait_async(timeout=0.5)
    (tmp_path / "go").touch()
    ray.get(held)
    version = sender.send(parts.net(10.0))
    assert parts.ask(crew, "look") == [(10.0, version)] * 2
    if fan_out is None:
        sender.send(parts.net(11.0), 1)
        assert [value for value, _ in parts.ask(crew, "look")] == [10.0, 11.0]
    else:
        with pytest.raises(ValueError, match="share one arena"):
            sender.send(parts.net(11.0), 1)
        assert len({inode for _, inode, _ in parts.ask(crew, "used")}) == 1


def test_a_stopped_actor_is_late_and_gets_nothing_new_until_it_answers(crew):
    sender = sender_to(crew)
    sender.send(parts.net(1.0))
    processes.stop(pid := parts.ask(crew, "pid")[0])
    try:
        for value in (2.0, 3.0, 4.0):
            sender.send_async(parts.net(value))
            processes.until(lambda value=value: parts.ask(crew[1:], "look") == [(value, int(value))])
            with naming(AckTimeout, [0]):
                sender.wait_async(timeout=0.5)
    finally:
        processes.resume(pid)
    for value in (5.0, 6.0, 7.0):
        assert sender.send(parts.net(value)) == int(value)
        assert parts.ask(crew, "look") == [(value, int(value))] * 2
    assert parts.ask(crew, "count") == [5, 7]  # 1, 2, 5, 6, 7: two were not sent to it


def test_documented_arguments_and_a_context(crew):
    context = Context(remote_collectors=crew, num_workers=2)
    for given in ({"context": context}, {"remote_collectors": crew, "num_collectors": 2, "pipes": None}):
        scheme = RayWeightSyncScheme()
        scheme.init_on_sender("policy", source_model=parts.net(3.0), **given)
        scheme.get_sender().send()
        assert [value for value, _ in parts.ask(crew, "look")] == [3.0] * 2
    with pytest.raises(ValueError, match="num_workers is 3 but there are 2"):
        RayWeightSyncScheme().init_on_sender("policy", remote_collectors=crew, num_workers=3)
    with pytest.raises(ValueError, match="remote_collectors must be given"):
        RayWeightSyncScheme().init_on_sender("policy")
