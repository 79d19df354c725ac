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


@pytest.mark.parametrize("slots", [1, 2])
def test_a_body_that_raises_poisons_the_only_slot(both, slots):
    pub, sub = both({"t": torch.zeros(4)}, slots=slots)
    with pytest.raises(KeyError), pub.update() as weights:
        weights["typo"].fill_(1)
    if slots == 1:
        with pytest.raises(shmsync.Poisoned), sub.read(timeout=0.05):
            pass
    else:
        with sub.read() as section:
            assert section.version == 1
    assert pub.publish({"t": torch.ones(4)}) == 2
    with sub.read() as section:
        assert section.weights["t"].tolist() == [1] * 4
