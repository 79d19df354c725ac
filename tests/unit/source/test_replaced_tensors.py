"""The trainer's module replaces its tensors, in every way there is: what workers see is what it has now."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

import shmsync
from support.zoo.replacing import (
    HOLDS,
    WAYS,
    Held,
    Policy,
    add_in_place,
    assert_current,
    load_assign,
    new_parameter,
    shown,
    update,
)


@pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", HOLDS)
def test_workers_see_what_the_module_has_now(publisher, subscriber, how, replace):
    module = Policy()
    held = Held(publisher, module, how)
    sub = subscriber(held.pub)
    for _ in range(2):
        replace(module)
        held.send()
        assert_current(sub, module)
        with held.pub.update() if how.startswith("adopted") else nullcontext():
            add_in_place(module)
        held.send()
        assert_current(sub, module)
    held.close()


@pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)
def test_what_is_replaced_inside_update_belongs_to_that_version(adopted, replace):
    module = Policy()
    pub, sub = adopted(module)
    with pub.update():
        replace(module)
        add_in_place(module)
    assert_current(sub, module)


def test_two_parameters_that_change_places_keep_their_values(adopted):
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    pub, sub = adopted(module)
    first, second = (layer.weight.detach().clone() for layer in module)
    module[0].weight, module[1].weight = module[1].weight, module[0].weight
    update(pub)
    assert torch.equal(module[0].weight, second) and torch.equal(module[1].weight, first)
    assert_current(sub, module)


def test_a_parameter_that_was_taken_out_of_an_adopted_module_keeps_its_values(adopted):
    module = Policy()
    pub, _ = adopted(module)
    old = module.lin.bias
    bias = old.detach().clone()
    module.lin.bias = nn.Parameter(torch.full((3,), 5.0))
    pub.publish()
    assert torch.equal(old, bias)
    module.lin.bias = old
    update(pub)
    assert torch.equal(pub.weights["lin", "bias"], bias)
    over_the_same = module.lin.bias = nn.Parameter(old.data)
    pub.publish()
    module.lin.bias = nn.Parameter(torch.full((3,), 6.0))
    pub.publish()
    assert torch.equal(old, bias) and torch.equal(over_the_same, bias)


def test_a_mapping_published_over_replaced_parameters_is_what_they_are_then(adopted):
    module = Policy()
    pub, _ = adopted(module)
    new_parameter(module)
    pub.publish({"lin.weight": torch.full((3, 3), 4.0)})
    assert (module.lin.weight == 4).all()
    load_assign(module)
    given = {"lin.weight": module.lin.weight, "lin.bias": torch.full((3,), 2.0)}  # one of them is the new one itself
    value = module.lin.weight.detach().clone()
    pub.publish(given)
    assert torch.equal(module.lin.weight, value) and (module.lin.bias == 2).all()
    assert torch.equal(pub.weights["lin", "weight"], value)


class Twice(nn.Module):
    """Has one buffer under two names, if `same`."""

    def __init__(self, same):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.a.register_buffer("scale", torch.zeros(2))
        self.b.register_buffer("scale", self.a.scale if same else torch.zeros(2))


@pytest.mark.parametrize("same", [False, True], ids=["two places", "one place"])
def test_a_buffer_with_two_names_is_seen_under_both(adopted, same):
    module = Twice(same)
    pub, sub = adopted(module)

    def updated():
        update(pub)
        assert_current(sub, module)

    module.a.scale = module.b.scale = torch.ones(2)
    updated()
    module.a.scale.add_(1)
    updated()
    module.a.scale = torch.full((2,), 7.0)  # under one name only
    if same:
        with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"):
            updated()
        module.b.scale = torch.full((2,), 7.0)  # of equal values
        updated()
        module.b.scale.add_(1)
        with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"):
            updated()
    else:
        updated()
        module.b.scale.add_(1)
        updated()


@pytest.mark.parametrize("how", ["source", "adopted, update"])
def test_a_scripted_module_is_followed_without_dicts_to_watch(publisher, subscriber, how):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    module = nn.Sequential(scripted, nn.Linear(2, 2))
    held = Held(publisher, module, how)
    sub = subscriber(held.pub)
    assert set(shown(sub)) == {*module.state_dict()}
    for value in (3.0, 4.0):
        getattr(scripted, "0").weight = nn.Parameter(torch.full((2, 2), value))
        module(torch.randn(4, 2))
        held.send()
        assert_current(sub, module)
        with held.pub.update() if how.startswith("adopted") else nullcontext():
            add_in_place(module)
        held.send()
        assert_current(sub, module)


@pytest.mark.parametrize("how", ["source", "itself", "adopted"])
def test_tensordict_params_are_what_they_hold_now(both, how):
    params = TensorDictParams(TensorDict({"w": torch.zeros(2, 2), "b": torch.zeros(2)}))
    pub, sub = both(params)
    if how == "adopted":
        pub.adopt(params)

    def sent():
        if how == "adopted":
            update(pub)
        else:
            pub.publish(params if how == "itself" else None)
        seen = shown(sub)
        assert torch.equal(seen["w"], params["w"]) and torch.equal(seen["b"], params["b"])

    params["w"] = nn.Parameter(torch.full((2, 2), 3.0))
    sent()
    with pub.update() if how == "adopted" else nullcontext():
        params.data["w"].fill_(4)
    sent()
    params["w"].data = torch.full((2, 2), 5.0)
    sent()
