"""update(): weights written in place."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import shmsync
from support.calls import Call, calls_of
from support.weights import fail_half_way


def test_replacing_a_key_in_update_is_refused_rather_than_lost(publisher):
    pub = publisher({"t": torch.zeros(2)}, slots=2)
    with pytest.raises(RuntimeError), pub.update() as weights:
        weights["t"] = torch.ones(2)
    assert pub.version == 1


def test_publishing_a_poisoned_arena_into_itself_repairs_nothing(publisher):
    pub = publisher({"w": torch.zeros(3)})
    fail_half_way(pub, "w")
    with pytest.raises(shmsync.Poisoned):
        pub.publish(pub.weights)
    assert pub.publish() == 2


def test_the_body_of_update_does_not_eat_the_workers_time(publisher, subscriber):
    pub = publisher({"w": torch.zeros(3)}, slots=2)
    sub = subscriber(pub, worker=0)

    def apply():
        sub.wait_version(2)
        sub.refresh()

    with pub.update(wait=[0], timeout=2.0):
        time.sleep(2.1)  # nothing would be left of it
        worker = Call(apply)
    worker.result()
    assert sub.version == 2


def test_an_error_in_the_body_is_not_hidden_by_a_busy_writer():
    pub = shmsync.Publisher({"w": torch.zeros(3)})
    update = pub.update()
    with pytest.raises(ZeroDivisionError), pub:
        update.__enter__()
        raise ZeroDivisionError
    update.__exit__(None, None, None)
    pub.close()


def test_an_update_keeps_its_publisher(subscriber):
    update = shmsync.Publisher({"w": torch.zeros(3)}).update()  # nothing else has the publisher
    gc.collect()
    with update as weights:
        weights["w"].fill_(1)
        publisher = update._publisher
    sub = subscriber(publisher)
    assert (sub.weights["w"] == 1).all()
    publisher.close()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["nested", "another thread"])
def test_one_update_entered_twice_leaves_the_outer_one_alone(publisher, elsewhere):
    pub = publisher({"t": torch.zeros(4)})
    update = pub.update()

    def again():
        with update:
            pass

    with update as weights:
        with pytest.raises(shmsync.WriterBusy):
            Call(again).result() if elsewhere else again()
        with pytest.raises(shmsync.WriterBusy):  # the lock is still held
            pub.publish()
        weights["t"].fill_(1)
    assert pub.version == 2
    assert pub.weights["t"].tolist() == [1] * 4


def test_an_update_that_is_over_cannot_be_left_again(publisher):
    pub = publisher({"t": torch.zeros(4)})
    update = pub.update()
    with pytest.raises(shmsync.ProtocolError, match="not entered"):
        update.__exit__(None, None, None)
    with update:
        pass
    with pytest.raises(shmsync.ProtocolError, match="not entered"):
        update.__exit__(None, None, None)
    with pub.update() as weights:
        with pytest.raises(shmsync.ProtocolError, match="not entered"):
            update.__exit__(ValueError, None, None)
        with pytest.raises(shmsync.WriterBusy), update:
            pass
        weights["t"].fill_(1)
    assert pub.version == 3
    with update as weights:  # entered again
        weights["t"].fill_(2)
    assert pub.version == 4


def missed(weights):
    with pytest.raises(KeyError):
        weights["typo"]
    return weights


NOTHING = {
    "an error before any use": lambda weights: 1 / 0,
    "a key that is not there": lambda weights: weights["typo"],
    "a nested key that is not there": lambda weights: weights["layer", "typo"],
    "a dotted key that is not there": lambda weights: weights["layer.typo"],
    "a dotted part that is not there": lambda weights: weights["layer", "7.bias"],
}
SOMETHING = {
    "a leaf": lambda weights: weights["layer", "bias"].fill_(7),
    "a leaf by its dotted key": lambda weights: weights["layer.bias"].fill_(7),
    "a level": lambda weights: weights["layer"]["bias"].fill_(7),
    "items()": lambda weights: [leaf.fill_(7) for _, leaf in weights.items(True, True)],
    "data": lambda weights: weights.data["t"].fill_(7),
    "apply_()": lambda weights: weights.apply_(lambda leaf: leaf.fill_(7)),
    "tree_leaves()": lambda weights: [leaf.fill_(7) for leaf in torch.utils._pytree.tree_leaves(weights)],
    "a key that is there, after one that is not": lambda weights: missed(weights)["t"].fill_(7),
}


@pytest.mark.parametrize("earlier", ["first", "later"])
@pytest.mark.parametrize("use", [*NOTHING, *SOMETHING])
def test_only_a_body_that_may_have_written_poisons(both, use, earlier):
    pub, sub = both({"t": torch.zeros(4), "layer.bias": torch.zeros(4)})
    if earlier == "later":
        with pub.update() as weights:
            weights["t"].fill_(1)
    before = pub.version

    def fail():
        with pub.update() as weights:
            (NOTHING | SOMETHING)[use](weights)
            raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, KeyError)):
        fail()
    assert pub._writer.side.writer.poisoned == (use in SOMETHING)
    if use in NOTHING:
        with sub.read() as section:
            assert section.version == before and not section.weights["layer", "bias"].any()
    assert pub.publish({"t": torch.ones(4), "layer.bias": torch.ones(4)}) == before + 1


KEPT = {
    "a leaf": lambda weights: weights["t"],
    "an array": lambda weights: weights["t"].numpy(),
    "data": lambda weights: weights["t"].data,
    "a slice": lambda weights: weights["t"][1:],
    "a level": lambda weights: weights["layer"],
    "a nested level": lambda weights: weights["layer", "inner"],
}


@pytest.mark.parametrize("keep", KEPT)
def test_what_was_kept_of_an_earlier_update_poisons_too(publisher, keep):
    pub = publisher({"t": torch.zeros(4), "layer.bias": torch.zeros(4), "layer.inner.bias": torch.zeros(4)})
    with pub.update() as weights:
        kept = KEPT[keep](weights)
    with pytest.raises(ZeroDivisionError), pub.update():
        (kept["bias"] if "level" in keep else kept)[:] = 5
        raise ZeroDivisionError
    assert pub._writer.side.writer.poisoned


def test_a_deep_module_costs_an_update_no_more_calls(publisher):
    def calls(layers):
        pub = publisher({f"{layer}.weight": torch.zeros(1) for layer in range(layers)})

        def update():
            with pub.update() as weights:
                weights["0", "weight"].fill_(1)

        update()
        return len(calls_of(update))

    assert calls(300) <= calls(3) + 5


def test_a_thread_that_began_to_use_the_weights_is_overtaken_by_another(publisher):
    pub = publisher({"t": torch.zeros(4), "u": torch.zeros(4)})
    with pub.update() as weights:
        untouched = type(weights)  # a thread has looked its methods up here
        weights["u"].fill_(1)  # and another thread's use comes first
        untouched.__getitem__(weights, "t").fill_(2)
        assert untouched.__getattribute__(weights, "batch_size") == torch.Size([])
    assert pub.version == 2 and pub.weights["t"].eq(2).all()
