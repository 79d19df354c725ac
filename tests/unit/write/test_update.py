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


def test_augmented_assignment_writes_in_place(publisher):
    pub = publisher({"a.b": torch.ones(2), "n": torch.zeros(())})
    with pub.update() as weights:
        weights["a.b"] *= 3
        weights["n"] += 1
    assert {key: value.tolist() for key, value in pub.state_dict().items()} == {"a.b": [3.0, 3.0], "n": 1.0}


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

    with pub.update(wait=[0], timeout=0.5):
        time.sleep(0.6)  # nothing would be left of it
        worker = Call(apply)
    worker.result()
    assert sub.version == 2


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
