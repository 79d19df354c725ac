"""RayWeightUpdater, with real actors, and what it and a sender do when an actor dies."""

from __future__ import annotations

import math

import pytest
from tensordict import TensorDict

from shmsync import AckTimeout, RayWeightSyncScheme, RayWeightUpdater, WorkerDied
from support.calls import naming
from support.weights import fill

ray = pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from support.remote import ray_parts as parts  # noqa: E402  needs Ray


def updater_of(actors, weights=None, **options):
    # With no deadline, only the death of a worker can end a wait for it.
    return RayWeightUpdater(weights, actors, **{"timeout": math.inf, **options})


def values(actors):
    return [value for value, _ in parts.ask(actors, "look")]


def counted(crew, updater, pushes):
    """How often each actor is given weights in pushes to these workers."""
    before = parts.ask(crew, "count")
    for worker_ids in pushes:
        updater.push_weights(parts.net(1.0), worker_ids)
    return [now - then for now, then in zip(parts.ask(crew, "count"), before, strict=True)]


def test_actors_get_modules_tensordicts_and_dicts(crew):
    updater = updater_of(crew)
    assert updater.all_worker_ids() == [0, 1]
    updater.push_weights(parts.net(1.0))
    assert values(crew) == [1.0] * 2
    updater.push_weights(TensorDict.from_module(parts.net(2.0)))
    assert values(crew) == [2.0] * 2
    updater.push_weights(dict(parts.net(3.0).state_dict()))
    assert values(crew) == [3.0] * 2
    updater.push_weights(parts.net(4.0), worker_ids=1)
    updater.push_weights(parts.net(5.0), worker_ids=[0])
    assert values(crew) == [5.0, 4.0]
    with pytest.raises(ValueError, match="worker 2 is not registered"):
        updater.push_weights(parts.net(6.0), worker_ids=2)
    assert values(crew) == [5.0, 4.0]


@pytest.mark.slow
def test_the_servers_weights_are_read_at_each_push(crew):
    model = parts.net(1.0)
    for weights in (model, TensorDict.from_module(model).data, model.state_dict()):
        updater = updater_of(crew, weights)
        for value in (1.0, 2.0):
            fill(model, value)
            updater.push_weights()
            assert values(crew) == [value] * 2


@pytest.mark.slow
def test_weights_that_are_in_the_store_already_are_pushed_as_they_are(crew):
    updater_of(crew).push_weights(ray.put(dict(parts.net(7.0).state_dict())))
    assert values(crew) == [7.0] * 2


def test_a_worker_is_skipped_until_more_than_max_interval_batches_passed(crew):
    for interval, expected in ((0, 6), (1, 3), (2, 2)):
        assert counted(crew, updater_of(crew, max_interval=interval), [None] * 6) == [expected] * 2
    # Worker 0 is due in the second push, and worker 1 in the third.
    assert counted(crew, updater_of(crew, max_interval=1), [None, [0], [0, 1]]) == [1, 1]


@pytest.mark.slow
def test_a_busy_actor_is_late(crew, tmp_path):
    updater = updater_of(crew, timeout=2.0)
    held = crew[1].hold.remote(str(tmp_path / "go"))
    try:
        with pytest.raises(AckTimeout) as caught:
            updater.push_weights(parts.net(1.0))
    finally:
        (tmp_path / "go").touch()
        ray.get(held)
    assert caught.value.missing == [1]


@pytest.mark.slow
def test_the_list_of_actors_is_read_at_each_push(crew):
    actors = [crew[0]]
    updater = updater_of(actors)
    updater_of(crew).push_weights(parts.net(1.0))
    updater.push_weights(parts.net(2.0))
    assert values(crew) == [2.0, 1.0]
    actors.append(crew[1])
    updater.push_weights(parts.net(3.0))
    assert values(crew) == [3.0, 3.0]
    del actors[0]
    updater.push_weights(parts.net(4.0))
    assert values(crew) == [3.0, 4.0]


def test_a_killed_actor_is_named_and_another_takes_its_place(crew):
    first, second = crew
    scheme = RayWeightSyncScheme(timeout=math.inf)
    scheme.init_on_sender("policy", remote_collectors=crew)
    sender, updater, called = scheme.get_sender(), updater_of(crew), []
    updater.register_post_hook(lambda: called.append(None))
    sender.send(parts.net(1.0))
    updater.push_weights(parts.net(1.0))
    parts.kill_one(second)
    with naming(WorkerDied, [1]):
        sender.send(parts.net(2.0))
    assert sender.send(parts.net(3.0)) == 3
    assert parts.ask([first], "look") == [(3.0, 3)] and sender.is_dead(1)
    before = parts.ask([first], "count")[0]
    sender.register_worker(1, first)
    assert sender.send(parts.net(4.0)) == 4
    assert parts.ask([first], "look") == [(4.0, 4)] and parts.ask([first], "count") == [before + 2]
    with naming(WorkerDied, [1]):
        updater.push_weights(parts.net(5.0))
    assert values([first]) == [5.0] and len(called) == 1  # that push did not go well
    updater.push_weights(parts.net(6.0))
    assert values([first]) == [6.0] and len(called) == 2
    with pytest.raises(WorkerDied, match="worker 1 died before"):
        updater.push_weights(parts.net(7.0), worker_ids=1)
    assert len(called) == 2
