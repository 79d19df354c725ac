"""Weight updaters: WeightUpdaterBase as people derive from it, and RayWeightUpdater with real actors."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync import AckTimeout, RayWeightUpdater, WeightUpdaterBase, WorkerDied


class Collector:
    def __init__(self):
        self.increments = 0

    def increment_version(self):
        self.increments += 1


class Recorder(WeightUpdaterBase):
    """Keeps what each worker would get."""

    def __init__(self, workers=(0, 1, 2)):
        self.workers = workers
        self.sent = []

    def all_worker_ids(self):
        return self.workers

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        self.sent.append((worker_id, server_weights))


class Even(Recorder):
    """Overrides all that there is to override."""

    def _get_server_weights(self):
        return nn.Linear(1, 1)

    def _maybe_map_weights(self, policy_or_weights):
        return type(policy_or_weights).__name__

    def _skip_update(self, worker_id):
        return worker_id % 2 == 1


def test_what_is_pushed_gets_to_all_workers_or_to_the_chosen():
    weights = {"weight": torch.ones(1)}
    for chosen, expected in ((None, [0, 1, 2]), (1, [1]), ([2, 0], [2, 0]), ([], [])):
        updater = Recorder()
        updater.push_weights(weights, worker_ids=chosen)
        assert [worker for worker, _ in updater.sent] == expected
        assert all(sent is weights for _, sent in updater.sent)
    with pytest.raises(ValueError, match="worker 3 is not registered"):
        Recorder().push_weights(weights, worker_ids=[0, 3])


def test_an_updater_without_worker_ids_has_one_worker():
    updater = Recorder(None)
    updater({"weight": torch.ones(1)})  # calling it pushes
    assert [worker for worker, _ in updater.sent] == [None]


def test_modules_are_pushed_as_tensordicts_and_other_things_refused():
    module = nn.Linear(2, 1)
    updater = Recorder([0])
    updater.push_weights(module)
    updater.push_weights(TensorDict.from_module(module))
    for _, sent in updater.sent:
        assert isinstance(sent, TensorDict)
        assert torch.equal(sent["weight"], module.weight)
    for wrong in (3, "weights", None):  # None: this updater has no weights of its own
        with pytest.raises(TypeError, match="torch.nn.Module"):
            updater.push_weights(wrong)


def test_a_subclass_may_override_each_step():
    updater = Even(range(5))
    updater.push_weights()
    updater.push_weights({}, worker_ids=[1, 2])
    assert updater.sent == [(0, "Linear"), (2, "Linear"), (4, "Linear"), (2, "dict")]


def test_a_collector_is_registered_once_and_held_weakly():
    updater, collector = Recorder(), Collector()
    assert updater.collector is None
    updater.increment_version()  # of nothing
    updater.register_collector(collector)
    assert updater.collector is collector
    updater.increment_version()
    assert collector.increments == 1
    with pytest.raises(RuntimeError, match="already"):
        updater.register_collector(Collector())
    del collector
    gc.collect()
    assert updater.collector is None
    updater.increment_version()
    with pytest.raises(RuntimeError, match="already"):
        updater.register_collector(Collector())


def test_hooks_are_called_in_their_order_after_each_push_that_went_well():
    updater, called = Recorder([0]), []
    updater.register_post_hook(lambda: called.append(("first", len(updater.sent))))
    updater.register_post_hook(lambda: called.append(("second", len(updater.sent))))
    assert len(updater.post_hooks) == 2
    assert Recorder().post_hooks == []  # no two updaters share theirs
    updater.push_weights({})
    updater.push_weights({})
    with pytest.raises(TypeError):
        updater.push_weights(3)
    assert called == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_init_and_from_policy_do_nothing_unless_overridden():
    updater = Recorder()
    updater.init(1, two=2)
    assert updater.sent == []
    assert Recorder.from_policy(nn.Linear(1, 1)) is None
    with pytest.raises(TypeError, match="abstract"):
        WeightUpdaterBase()


# ---- with actors

ray = pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from shmsync import RayWeightSyncScheme  # noqa: E402
from support import processes  # noqa: E402
from support.calls import naming  # noqa: E402
from support.remote import ray_parts as parts  # noqa: E402  needs Ray


@pytest.fixture(scope="module")
def crew(one_ray):
    """Two actors that no test kills."""
    return parts.start(RayWeightSyncScheme("tensordict"), 2)


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


def test_the_servers_weights_are_read_at_each_push(crew):
    model = parts.net(1.0)
    for weights in (model, TensorDict.from_module(model).data, model.state_dict()):
        updater = updater_of(crew, weights)
        for value in (1.0, 2.0):
            with torch.no_grad():
                model.weight.fill_(value)
                model.bias.fill_(value)
            updater.push_weights()
            assert values(crew) == [value] * 2


def test_each_push_makes_one_object_whatever_the_number_of_actors(crew):
    assert 3 <= parts.objects_of_three(updater_of(crew).push_weights) < 3.5


def test_weights_that_are_in_the_store_already_are_pushed_as_they_are(crew):
    updater_of(crew).push_weights(ray.put(dict(parts.net(7.0).state_dict())))
    assert values(crew) == [7.0] * 2


def test_a_worker_is_skipped_until_more_than_max_interval_batches_passed(crew):
    for interval, expected in ((0, 6), (1, 3), (2, 2)):
        assert counted(crew, updater_of(crew, max_interval=interval), [None] * 6) == [expected] * 2
    # Worker 0 is due in the second push, and worker 1 in the third.
    assert counted(crew, updater_of(crew, max_interval=1), [None, [0], [0, 1]]) == [1, 1]


def test_a_killed_actor_is_named_and_left_out(crew):
    (actor,) = parts.start(RayWeightSyncScheme("tensordict"))
    updater, called = updater_of([*crew, actor]), []
    updater.register_post_hook(lambda: called.append(None))
    updater.push_weights(parts.net(1.0))
    processes.kill(ray.get(actor.pid.remote()))
    with naming(WorkerDied, [2]):
        updater.push_weights(parts.net(2.0))
    assert values(crew) == [2.0] * 2
    assert len(called) == 1  # that push did not go well
    updater.push_weights(parts.net(3.0))
    assert values(crew) == [3.0] * 2
    assert len(called) == 2
    with pytest.raises(WorkerDied, match="worker 2 died before"):
        updater.push_weights(parts.net(4.0), worker_ids=2)
    assert len(called) == 2


def test_an_exception_of_an_actor_raises_in_the_push(crew):
    ray.get(crew[0].fail_with.remote(parts.Refusal("not now")))
    try:
        with pytest.raises(parts.Refusal, match="not now") as caught:
            updater_of(crew).push_weights(parts.net(1.0))
        assert "update_policy_weights_" in str(caught.value.__cause__)
    finally:
        ray.get(crew[0].fail_with.remote(None))


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
