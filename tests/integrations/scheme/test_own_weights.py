"""Many updates, with weights and without, for some workers or all: each worker has what a plain model says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from shmsync.integrations.torchrl.trainer import own_weights
from support.torchrl.pair import Counting, filled


def linear(value=0.0):
    return filled(nn.Linear(2, 2), float(value))


@pytest.mark.parametrize("options", [{}, {"slots": 2}, {"per_worker_weights": True}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_updates_in_any_order(pair, seed, options):
    draw = random.Random(seed)
    own, workers = linear(), 3
    made = pair(own, workers=workers, **options)
    value, have = 0, [0] * workers
    at_others = [None] * workers  # the policy's value when other weights went to the worker
    for _ in range(40):
        chosen = draw.choice([None, [0], [1, 2], [0, 1, 2], [2]])
        reached = range(workers) if chosen is None else chosen
        step = draw.choice(["write", "write again", "others", "others by worker", "policy", "nothing", "nothing"])
        if step.startswith("write"):
            value += step == "write"  # the same values once more are no change
            filled(own, value)
        elif step == "policy":
            made.sender.send(own, chosen)
        elif step == "nothing":
            made.sender.send(None, chosen)
        elif step == "others":
            other = draw.randrange(1000, 2000)
            sent = linear(other)
            made.sender.send(draw.choice([sent, sent.state_dict()]), chosen)
            filled(sent, -1.0)  # it may change afterwards
        else:
            other = draw.randrange(2000, 3000)
            made.sender.send({worker: linear(other + worker) for worker in reached})
        for worker in [] if step.startswith("write") else reached:
            if step.startswith("others"):
                have[worker], at_others[worker] = other + worker * (step != "others"), value
            elif step == "policy" or at_others[worker] != value:
                have[worker], at_others[worker] = value, None
        for worker in range(workers):
            assert made.weights("weight")[worker].unique().tolist() == [have[worker]], (step, chosen)


@pytest.mark.parametrize("send", ["policy", "parameters", "state dict", "nothing"])
def test_the_policys_own_tensors_are_not_copied_to_be_compared(pair, send, monkeypatch):
    def refuse(self, *args):
        raise AssertionError("copied")

    monkeypatch.setattr(own_weights._Compared, "look", refuse)
    monkeypatch.setattr(own_weights._Compared, "differs", refuse)
    own = linear()
    made = pair(own, workers=1)
    forms = {"policy": own, "parameters": dict(own.named_parameters()), "state dict": own.state_dict(), "nothing": None}
    for value in (1, 2):
        filled(own, value)
        made.sender.send(forms[send])
        assert made.weights("weight")[0].unique().tolist() == [value]


def test_the_copy_is_gone_with_the_last_worker_that_has_other_weights(pair):
    own = linear()
    made = pair(own, workers=2)
    seen = made.sender._sender._own._seen
    made.sender.send(linear(5))
    assert len(seen) == 1
    made.sender.send(own, [0])
    assert len(seen) == 1
    filled(own, 1)
    made.sender.send(None)
    assert not seen and [each.unique().tolist() for each in made.weights("weight")] == [[1], [1]]


def test_values_that_are_no_numbers_are_compared_by_their_bytes(pair):
    own = linear(float("nan"))
    made = pair(own, workers=1)
    made.sender.send(linear(5))
    made.sender.send(None)
    assert made.weights("weight")[0].unique().tolist() == [5]
    filled(own, 0.0)
    made.sender.send(linear(6))
    filled(own, -0.0)
    made.sender.send(None)
    assert torch.signbit(made.weights("weight")[0]).all()


def test_weights_without_an_element(pair):
    own = nn.ParameterDict({"none": torch.empty(0, 3)})
    made = pair(own, workers=1)
    made.sender.send(nn.ParameterDict({"none": torch.empty(0, 3)}))
    version = made.sender.send(None)
    assert made.sender.send(None) == version + 1


def test_extra_state_alone_may_change(pair):
    own = Counting()
    made = pair(own, workers=1)
    other = Counting()
    other.words = ["other"]
    made.sender.send(other)
    made.sender.send(None)
    assert made.models[0].words == ["other"]
    own.words = ["own"]
    made.sender.send(None)
    assert made.models[0].words == ["own"]
