"""publish(), update() and adopt() in one process."""

from __future__ import annotations

import math
import threading
import time
import weakref

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync


def weights_of(sub):
    return {key: value.clone() for key, value in sub.weights.items(True, True)}


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_versions_count_up_and_readers_see_them(publisher, subscriber, slots):
    source = {"t": torch.zeros(4)}
    pub = publisher(source, slots=slots)
    sub = subscriber(pub)
    assert pub.version == sub.version == 1
    for version in range(2, 9):
        source["t"].fill_(version)
        assert pub.publish() == version
        assert sub.lag == 1
        with sub.read() as section:
            assert section.version == version
            assert section.weights["t"].tolist() == [version] * 4
        assert not section.torn


@pytest.mark.parametrize("slots", [1, 2])
def test_a_partial_publish_writes_only_its_leaves(publisher, subscriber, slots):
    pub = publisher({"a": torch.zeros(3), "b": torch.zeros(1000)}, slots=slots)
    sub = subscriber(pub)
    before = pub.stats().bytes_copied
    pub.publish({"a": torch.ones(3)})
    if slots == 1:
        assert pub.stats().bytes_copied - before == 12
    sub.refresh()
    assert sub.weights["a"].tolist() == [1, 1, 1]
    assert sub.weights["b"].abs().sum() == 0
    pub.publish({"b": torch.ones(1000)})
    sub.refresh()
    assert sub.weights["a"].tolist() == [1, 1, 1]
    assert sub.weights["b"].sum() == 1000


BAD = {
    "shape": lambda good: {**good, "299": torch.zeros(3)},
    "dtype": lambda good: {**good, "299": torch.zeros(2, dtype=torch.float64)},
    "key": lambda good: {**good, "300": torch.zeros(2)},
    "device": lambda good: {**good, "299": torch.zeros(2, device="meta")},
    "type": lambda good: {**good, "299": 3},
}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kind", BAD)
def test_one_wrong_leaf_of_300_changes_nothing(publisher, subscriber, slots, kind):
    good = {str(i): torch.full((2,), float(i)) for i in range(300)}
    pub = publisher(good, slots=slots)
    sub = subscriber(pub)
    before = weights_of(sub)
    bad = BAD[kind]({key: value + 1 for key, value in good.items()})
    with pytest.raises(shmsync.ManifestMismatch, match=r"1 difference.*nothing was written"):
        pub.publish(bad)
    assert pub.version == 1
    assert not sub.refresh()
    assert all(torch.equal(before[key], value) for key, value in sub.weights.items(True, True))


def test_a_mismatch_lists_every_problem(publisher):
    pub = publisher(nn.Linear(2, 3))
    with pytest.raises(shmsync.ManifestMismatch) as error:
        pub.publish(nn.Sequential(nn.Linear(2, 3)))
    for said in (
        "0.weight is not in the arena",
        "0.bias is not in the arena",
        "weight is missing",
        "bias is missing",
    ):
        assert said in str(error.value)


def test_every_change_to_a_cached_module_is_seen(publisher, subscriber):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pub = publisher(module)
    sub = subscriber(pub)

    def check():
        pub.publish()
        sub.refresh()
        assert torch.equal(sub.weights["0", "weight"], module[0].weight)
        assert torch.equal(sub.weights["1", "weight"], module[1].weight)

    check()
    module[0].weight.data.add_(1)  # moves no autograd version counter
    check()
    module[0].weight.detach().numpy()[:] = 5
    check()
    module[0].weight.data = torch.full((2, 2), 9.0)  # another address
    check()
    module[1].weight = nn.Parameter(torch.full((2, 2), 4.0))  # another object
    check()
    module[1] = nn.Linear(2, 2)  # another submodule
    check()
    module[0].weight.data = torch.randn(2, 2).t()  # another memory order
    check()
    module.append(nn.Linear(2, 2))
    with pytest.raises(shmsync.ManifestMismatch, match="2.weight is not in the arena"):
        pub.publish()
    del module[2]
    check()
    module[0].weight.data = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(shmsync.ManifestMismatch, match="float64"):
        pub.publish()


def test_a_send_changes_no_trainer_tensor(publisher):
    module = nn.Linear(3, 3)
    addresses = [p.data_ptr() for p in module.parameters()]
    values = [p.detach().clone() for p in module.parameters()]
    pub = publisher(module)
    pub.publish()
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert all(torch.equal(p, v) for p, v in zip(module.parameters(), values, strict=True))


def test_publishing_the_arena_into_itself_is_refused_unless_it_is_in_place(publisher):
    pub = publisher({"a": torch.ones(4), "b": torch.zeros(4)})
    assert pub.publish(pub.weights) == 2
    with pytest.raises(shmsync.ManifestMismatch, match="clone"):
        pub.publish({"a": pub.weights["b"]})
    assert pub.publish({"a": pub.weights["b"].clone()}) == 3
    assert pub.weights["a"].sum() == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_update_publishes_on_leaving(publisher, subscriber, slots):
    pub = publisher({"t": torch.zeros(4), "kept": torch.ones(2)}, slots=slots)
    sub = subscriber(pub)
    for version in range(2, 7):
        with pub.update() as weights:
            assert weights["t"].tolist() == [version - 2] * 4
            weights["t"].fill_(version - 1)
        assert pub.version == version
        sub.refresh()
        assert sub.weights["t"].tolist() == [version - 1] * 4
        assert sub.weights["kept"].tolist() == [1, 1]


def test_update_copies_nothing_with_one_slot(publisher):
    pub = publisher({"t": torch.zeros(1000)})
    before = pub.stats().bytes_copied
    with pub.update() as weights:
        weights["t"].fill_(1)
    assert pub.stats().bytes_copied == before


def test_replacing_a_key_in_update_is_refused_rather_than_lost(publisher):
    pub = publisher({"t": torch.zeros(2)}, slots=2)
    with pytest.raises(RuntimeError), pub.update() as weights:
        weights["t"] = torch.ones(2)
    assert pub.version == 1


@pytest.mark.parametrize("partial", [True, False])
def test_a_failed_update_poisons_one_slot_until_a_whole_publish(publisher, subscriber, partial):
    source = {"a": torch.zeros(2), "b": torch.zeros(2)}
    pub = publisher(source)
    sub = subscriber(pub)
    with pytest.raises(ZeroDivisionError), pub.update() as weights:
        weights["a"].fill_(1)
        raise ZeroDivisionError
    with pytest.raises(shmsync.Poisoned), sub.read():
        pass
    with pytest.raises(shmsync.Poisoned), pub.update():
        pass
    if partial:
        with pytest.raises(shmsync.Poisoned):
            pub.publish({"a": torch.ones(2)})
    assert pub.publish() == 2
    with sub.read() as section:
        assert section.version == 2
        assert section.weights["a"].tolist() == [0, 0]


def test_a_failed_update_with_more_slots_is_abandoned(publisher, subscriber):
    pub = publisher({"t": torch.zeros(2)}, slots=2)
    sub = subscriber(pub)
    with pytest.raises(ZeroDivisionError), pub.update() as weights:
        weights["t"].fill_(1)
        raise ZeroDivisionError
    assert pub.version == 1
    with sub.read() as section:
        assert section.weights["t"].tolist() == [0, 0]
    assert pub.publish({"t": torch.ones(2)}) == 2


def test_nested_and_concurrent_writer_calls_are_refused_at_once(publisher):
    pub = publisher({"t": torch.zeros(2)})
    raised = []

    def publish():
        try:
            pub.publish()
        except shmsync.WriterBusy as error:
            raised.append(error)

    with pub.update():
        with pytest.raises(shmsync.WriterBusy):
            pub.publish()
        with pytest.raises(shmsync.WriterBusy), pub.update():
            pass
        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
    assert len(raised) == 1
    assert pub.version == 2


def test_adopted_parameters_are_the_slab(publisher, subscriber):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pub = publisher(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    pub.adopt(module, optimizer)
    assert pub.version == 1
    sub = subscriber(pub)
    before = sub.weights["0", "weight"].clone()
    for version in range(2, 5):
        module(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        assert pub.version == version
        sub.refresh()
        assert torch.equal(sub.weights["0", "weight"], module[0].weight)
        assert torch.equal(sub.weights["1", "running_mean"], module[1].running_mean)
    assert not torch.equal(before, module[0].weight)
    with pub.update():
        optimizer.step()  # inside update() already: joins it
    assert pub.version == 5
    pub.close()
    module[0].weight.data.add_(1)  # private again
    assert not torch.equal(sub.weights["0", "weight"], module[0].weight)


def test_adopt_publishes_first_what_differs(publisher, subscriber):
    pub = publisher(nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    pub.adopt(other)
    assert pub.version == 2
    assert torch.equal(subscriber(pub).weights["weight"], other.weight)


def test_adopt_needs_one_slot(publisher):
    pub = publisher(nn.Linear(2, 2), slots=2)
    with pytest.raises(ValueError, match="publish"):
        pub.adopt(nn.Linear(2, 2))


def test_names(publisher):
    pub = publisher({"t": torch.ones(1)}, name="unit-test-name")
    with pytest.raises(shmsync.ArenaExists, match="unit-test-name"):
        shmsync.Publisher({"t": torch.ones(1)}, name="unit-test-name")
    pub.close()
    publisher({"t": torch.ones(1)}, name="unit-test-name")
    with pytest.raises(ValueError, match="not '../x'"):
        shmsync.Publisher({"t": torch.ones(1)}, name="../x")


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 0},
        {"slots": 128},
        {"max_readers": 0},
        {"device": "cuda"},
        {"dtype": torch.int8},
        {"timeout": -1},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises((ValueError, RuntimeError)):
        shmsync.Publisher({"t": torch.ones(1)}, **options)


def test_wait_argument_is_checked_before_anything_is_written(publisher):
    pub = publisher({"t": torch.ones(1)})
    with pytest.raises(ValueError, match="wait is None"):
        pub.publish(wait="everyone")
    assert pub.version == 1


def test_wait_all_with_nobody_there_returns(publisher):
    assert publisher({"t": torch.ones(1)}).publish(wait="all") == 2


def test_a_named_worker_that_never_attached_times_out(publisher):
    with pytest.raises(shmsync.AckTimeout) as error:
        publisher({"t": torch.ones(1)}).publish(wait=[3], timeout=0.05)
    assert error.value.missing == [3]
    assert error.value.version == 2
    assert isinstance(error.value, TimeoutError)


def test_a_subscriber_that_does_not_refresh_is_named(publisher, subscriber):
    pub = publisher({"t": torch.ones(1)})
    subscriber(pub, worker=7)
    with pytest.raises(shmsync.AckTimeout) as error:
        pub.publish(wait="all", timeout=0.05)
    assert error.value.missing == [7]
    assert pub.version == 2


def test_stats_count_what_happened(publisher, subscriber):
    pub = publisher({"t": torch.ones(10)})
    sub = subscriber(pub, worker=1)
    with pub.update():
        pass
    with sub.read():
        (info,) = pub.readers()
        assert info.pinned == 2 and info.worker == 1 and info.lag == 0
        assert info.state == "live"
    stats = pub.stats()
    assert (stats.version, stats.publishes, stats.updates, stats.bytes_copied) == (2, 1, 1, 40)
    assert stats.publish.count == 2 and stats.publish.max >= stats.publish.p50 > 0
    with pytest.raises(AttributeError):
        stats.version = 3
    assert sub.stats().reads >= 2 and sub.stats().moves == 2


def test_an_unclosed_publisher_is_loud():
    pub = shmsync.Publisher({"t": torch.ones(1)})
    with pytest.warns(ResourceWarning, match="not closed"):
        del pub


def test_tied_leaves_with_different_values_are_refused(publisher, subscriber):
    shared = torch.zeros(3)
    pub = publisher({"a": shared, "b": shared})
    sub = subscriber(pub)
    with pytest.raises(shmsync.ManifestMismatch, match="a and b are one tensor in the arena"):
        pub.publish({"a": torch.ones(3), "b": torch.full((3,), 7.0)})
    assert pub.version == 1
    source = {"a": torch.ones(3), "b": torch.ones(3)}  # equal values are fine, each time anew
    pub.publish(source)
    source["b"][0] = 5
    with pytest.raises(shmsync.ManifestMismatch):
        pub.publish(source)
    assert (sub.snapshot().weights["b"] == 1).all()


def test_publishing_a_poisoned_arena_into_itself_repairs_nothing(publisher):
    pub = publisher({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="half way"), pub.update() as weights:
        weights["w"][0] = 1
        raise ValueError("half way")
    with pytest.raises(shmsync.Poisoned):
        pub.publish(pub.weights)
    assert pub.publish() == 2


def test_wait_takes_any_iterable_of_indices_and_refuses_others(publisher, subscriber):
    pub = publisher({"w": torch.zeros(3)})
    subscriber(pub, worker=0)
    with pytest.raises(shmsync.AckTimeout):
        pub.publish(wait=(index for index in [0]), timeout=0.05)
    for wrong in (5, "everybody", [-1], ["0"], [True]):
        with pytest.raises(ValueError, match="wait is|worker is"):
            pub.publish(wait=wrong)
    for wrong in (-1, math.nan, "x"):
        with pytest.raises(ValueError, match="timeout"):
            pub.publish(timeout=wrong)
        with pytest.raises(ValueError, match="timeout"):
            pub.update(timeout=wrong)
    assert pub.version == 2


def test_the_body_of_update_does_not_eat_the_workers_time(publisher, subscriber):
    pub = publisher({"w": torch.zeros(3)}, slots=2)
    sub = subscriber(pub, worker=0)

    def apply():
        sub.wait_version(2)
        sub.refresh()

    worker = threading.Thread(target=apply)
    with pub.update(wait=[0], timeout=5.0):
        pub._side.counts.publish.add(0.0)
        time.sleep(0.2)
        worker.start()
    worker.join()
    assert sub.version == 2


def test_a_publish_that_gives_nothing_is_refused(publisher):
    pub = publisher(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), exclude="1.*")
    for nothing in ({}, {"1.bias": torch.zeros(2)}):
        with pytest.raises(shmsync.ManifestMismatch, match="none of the arena's leaves"):
            pub.publish(nothing)
    assert pub.version == 1


def test_a_scripted_module_can_be_published(publisher, subscriber):
    module = torch.jit.script(nn.Linear(2, 2))
    pub = publisher(module)
    with torch.no_grad():
        module.weight.fill_(4)
    pub.publish()
    assert (subscriber(pub).weights["weight"] == 4).all()


def test_a_failing_close_still_ends_the_arena(publisher, monkeypatch):
    module = nn.Linear(2, 2)
    pub = publisher(module)
    pub.adopt(module)

    def no_memory():
        raise RuntimeError("no memory")

    monkeypatch.setattr(pub._side.adopted, "give_back", no_memory)
    with pytest.raises(RuntimeError, match="no memory"):
        pub.close()
    with pytest.raises(shmsync.ArenaNotFound):
        shmsync.Subscriber(pub.handle)


def test_an_error_in_the_body_is_not_hidden_by_a_busy_writer():
    pub = shmsync.Publisher({"w": torch.zeros(3)})
    update = pub.update()
    with pytest.raises(ZeroDivisionError), pub:
        update.__enter__()
        raise ZeroDivisionError
    update.__exit__(None, None, None)
    pub.close()


# ---- adopt


def test_adopting_never_casts_the_trainers_parameters(publisher):
    module = nn.Linear(2, 2)
    pub = publisher(module, dtype=torch.bfloat16)
    with pytest.raises(shmsync.ManifestMismatch, match="cast"):
        pub.adopt(module)
    assert module.weight.dtype == torch.float32


def test_the_optimizer_of_another_module_is_refused(publisher):
    module = nn.Linear(2, 2)
    pub = publisher(module)
    with pytest.raises(ValueError, match="none of them"):
        pub.adopt(module, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    pub.adopt(module)


def test_adopted_parameters_that_were_taken_out_go_in_again(publisher, subscriber):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module, optimizer)
    module.half().float()
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(sub.snapshot().weights["weight"], module.weight)
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(sub.snapshot().weights["weight"], module.weight)
    module.half()
    with pytest.raises(shmsync.ManifestMismatch, match="another shape, dtype"), pub.update():
        pass


def test_buffers_of_an_adopted_module_belong_to_the_version_they_were_made_in(publisher, subscriber):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module)
    with pub.update(), torch.no_grad():
        module(torch.randn(8, 3))
    assert torch.equal(sub.snapshot().weights["1", "running_mean"], module[1].running_mean)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_made_after_adopting_sees_the_steps(publisher):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    pub.adopt(module, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        module.weight.grad = torch.ones(2, 2)
        optimizer.step()
        scheduler.step()
    assert (pub.version, scheduler.get_last_lr()) == (3, [0.25])


@pytest.mark.parametrize("slots", [1, 2])
def test_a_version_that_nobody_applied_in_time_is_no_aborted_call(publisher, subscriber, slots):
    pub = publisher({"w": torch.zeros(3)}, slots=slots)
    subscriber(pub, worker=0)
    with pytest.raises(shmsync.AckTimeout), pub.update(wait=[0], timeout=0.05):
        pass
    assert (pub.version, pub.stats().updates, pub.stats().aborted) == (2, 1, 0)
    assert pub.publish() == 3


def test_every_change_to_a_tensordict_is_seen(publisher, subscriber):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    pub = publisher(module)
    sub = subscriber(pub)

    def published(source):
        pub.publish(source)
        sub.refresh()
        return [sub.weights["0", name].unique().item() for name in ("weight", "bias")]

    def fill(value):
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.fill_(value)

    shown = TensorDict.from_module(module)
    fill(1)
    assert published(shown) == [1, 1]
    fill(2)
    assert published(shown) == [2, 2]  # the same TensorDict
    fill(3)
    assert published(TensorDict.from_module(module)) == [3, 3]  # another, of the same tensors
    shown["0", "bias"] = torch.full((2,), 4.0)  # a replaced leaf
    assert published(shown) == [3, 4]
    fill(5)
    assert published(TensorDict.from_module(module)) == [5, 5]
    module[0].weight.data = torch.full((2, 2), 6.0)  # elsewhere in memory
    assert published(TensorDict.from_module(module)) == [6, 5]
    assert published({"0": {"weight": torch.full((2, 2), 7.0)}}) == [7, 5]
    assert published(TensorDict({"0": {"bias": torch.full((2,), 8.0)}})) == [7, 8]  # partial
    with pytest.raises(shmsync.ManifestMismatch, match="bias"):
        published(TensorDict({"0": {"bias": torch.zeros(3)}}))
    assert published(TensorDict.from_module(module)) == [6, 5]


def test_no_tensordict_of_values_is_kept_alive(publisher):
    pub = publisher(nn.Linear(2, 2))
    source = TensorDict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    alive = weakref.ref(source["weight"])
    pub.publish(source)
    pub.publish(source)
    del source
    assert alive() is None
