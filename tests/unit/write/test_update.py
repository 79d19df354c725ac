"""update(): weights written in place."""

from __future__ import annotations

import time

import pytest
import torch

import shmsync
from support.calls import Call
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


NOTHING = {
    "an error before any use": lambda weights: 1 / 0,
    "a key that is not there": lambda weights: weights["typo"],
    "a nested key that is not there": lambda weights: weights["layer", "typo"],
}
SOMETHING = {
    "a leaf": lambda weights: weights["layer", "bias"].fill_(7),
    "a leaf by its dotted key": lambda weights: weights["layer.bias"].fill_(7),
    "a level": lambda weights: weights["layer"]["bias"].fill_(7),
    "items()": lambda weights: [leaf.fill_(7) for _, leaf in weights.items(True, True)],
    "data": lambda weights: weights.data["t"].fill_(7),
    "apply_()": lambda weights: weights.apply_(lambda leaf: leaf.fill_(7)),
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
