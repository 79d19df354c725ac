"""The trainer's model replaces tensors and submodules: a send is of what it has now."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.pair import Counting, filled, net


def assign(model):
    model.load_state_dict({key: torch.full_like(t, 3) for key, t in model.state_dict().items()}, assign=True)


def new_parts(model):
    model[0] = filled(nn.Linear(3, 4), 3)
    model[1].running_mean = torch.full((4,), 3.0)
    model[2].weight = nn.Parameter(torch.full((2, 4), 3.0))


@pytest.mark.parametrize("replace", [assign, new_parts])
def test_replaced_tensors_are_sent(pair, replace):
    model = filled(net(), 1)
    both = pair(model)
    replace(model)
    both.sender.send()
    for name in ("0.weight", "1.running_mean", "2.weight"):
        assert all((w == 3).all() for w in both.weights(name))
    filled(model, 4)
    both.sender.send(model)
    for name in ("0.weight", "1.running_mean", "2.weight"):
        assert all((w == 4).all() for w in both.weights(name))


def test_a_replaced_tensor_that_does_not_fit_is_refused(pair):
    model = filled(net(), 1)
    both = pair(model)
    model[1].running_mean = torch.full((1,), 3.0)
    with pytest.raises(shmsync.ManifestMismatch, match="running_mean"):
        both.sender.send()
    assert all((w == 1).all() for w in both.weights("1.running_mean"))


def test_the_extra_state_of_a_new_submodule_is_sent(pair):
    model = nn.Sequential(Counting(), nn.Linear(2, 2))
    both = pair(model)
    both.sender.send()
    old, model[0] = model[0], Counting()
    model[0].words = ["b", "c"]
    both.sender.send()
    assert [own[0].words for own in both.models] == [["b", "c"]] * 2
    assert old.words == ["a"]


@pytest.mark.parametrize("mapped", [False, True], ids=["weights", "weights mapped to devices"])
def test_first_weights_are_those_of_the_moment_of_connect(mapped):
    model = filled(nn.Linear(2, 2), 1)
    weights = TensorDict(dict(model.state_dict()))
    options = {"model": model, "device_map_fn": lambda worker, td: td.clone(), "num_workers": 2}
    with ShmWeightSyncScheme(timeout=5.0) as sender:
        sender.init_on_sender(model_id="policy", **options if mapped else {"weights": weights, "devices": [None]})
        model.weight = nn.Parameter(torch.full((2, 2), 3.0))
        weights["weight"] = torch.full((2, 2), 3.0)
        sender.connect()
        assert (sender.weights["weight"] == 3).all()
