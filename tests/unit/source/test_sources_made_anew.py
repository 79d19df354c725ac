"""Weights that are new objects for each publish: their plan is found again, and each tensor is still looked at."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from shmsync.engine.write import copy_plan as plans
from support.odd_tensors import ODD
from support.weights import fill

FORMS = {
    "state_dict": lambda module: module.state_dict(),
    "clones": lambda module: {key: value.clone() for key, value in module.state_dict().items()},
    "nested": lambda module: {
        name: OrderedDict(child.state_dict()) for name, child in module.named_children() if child.state_dict()
    },
    "TensorDict": lambda module: TensorDict.from_module(module),
}
OPTIONS = {
    "plain": {},
    "two slots": {"slots": 2},
    "some cast": {"dtype": {"*.weight": torch.bfloat16}},
}


@pytest.fixture
def made(monkeypatch):
    """How many plans were made."""
    count = itertools.count()
    counted = []

    class Counted(plans.CopyPlan):
        def __init__(self, *args, **kwargs):
            counted.append(next(count))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(plans, "CopyPlan", Counted)
    return counted


def net():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    module[3].weight = module[2].weight
    return module


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", ["state_dict", "nested", "TensorDict", "clones"])
def test_the_plan_is_found_again_and_every_value_arrives(publisher, made, form, options):
    module = net()
    pub = publisher(module, **OPTIONS[options])
    for number in range(2, 9):
        if number == 5:
            module[3].bias = nn.Parameter(torch.zeros(3))  # elsewhere in memory
        fill(module, number)
        pub.publish(FORMS[form](module))
        for key, value in module.state_dict().items():
            shown = pub.weights.get(tuple(key.split(".")), None)
            assert shown is None or torch.equal(shown, value.to(shown.dtype)), key
    compared = form == "clones"  # tied leaves as two tensors: values compared each time
    assert len(made) == (8 if compared else 2)


def test_no_value_is_kept_alive_by_a_plan(publisher):
    pub = publisher({"t": torch.zeros(4), "strided": torch.zeros(4)})
    for make in (dict, OrderedDict, TensorDict):
        for _ in range(3):
            source = make({"t": torch.ones(4), "strided": torch.ones(8)[::2]})
            alive = [weakref.ref(value) for value in source.values()]
            pub.publish(source)
            pub.publish(source)
            del source
            gc.collect()
            assert not any(ref() is not None for ref in alive)


REFUSED = {
    "given back": ODD["given back"][0],
    "sparse": ODD["sparse"][0],
    "wrapper": ODD["wrapper"][0],
    "other dtype": lambda: torch.zeros(4, dtype=torch.float64),
    "other shape": lambda: torch.zeros(2, 2),
    "uninitialised": nn.UninitializedParameter,
    "no tensor": lambda: [0.0] * 4,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_at_every_publish_after_what_did(publisher, kind):
    pub = publisher({"t": torch.zeros(4), "other": torch.zeros(2)})
    for number in range(2, 5):
        pub.publish({"t": torch.full((4,), float(number)), "other": torch.zeros(2)})
        for _ in range(2):
            with pytest.raises(shmsync.ManifestMismatch):
                pub.publish({"t": REFUSED[kind](), "other": torch.zeros(2)})
        assert pub.version == number
        assert pub.weights["t"].tolist() == [number] * 4


def test_tied_leaves_that_come_apart_are_seen(publisher):
    shared = torch.zeros(3)
    pub = publisher({"a": shared, "b": shared, "c": torch.zeros(3)})
    one = torch.ones(3)
    for _ in range(2):
        pub.publish({"a": one, "b": one, "c": one})
        with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena"):
            pub.publish({"a": one, "b": one + 1, "c": one})
    equal = {"a": one, "b": one.clone(), "c": one}
    pub.publish(equal)
    equal["b"][0] = 5  # the values are compared each time
    with pytest.raises(shmsync.ManifestMismatch, match="a and b are one tensor in the arena"):
        pub.publish(equal)
    assert pub.weights["b"].tolist() == [1] * 3
    two = torch.full((3,), 2.0)
    pub.publish({"a": one, "b": one, "c": two})  # separate leaves may become one tensor, and two again
    assert pub.weights["c"].tolist() == [2] * 3
    pub.publish({"a": two, "b": two, "c": two})
    pub.publish({"a": two, "b": two, "c": one})
    assert pub.weights["c"].tolist() == [1] * 3
