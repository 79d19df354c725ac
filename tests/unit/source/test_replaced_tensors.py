"""The trainer's module replaces its tensors, in every way there is: what workers see is what it has now."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from support.zoo.replacing import (
    WAYS,
    Held,
    Policy,
    add_in_place,
    assert_current,
    shown,
    update,
)


@pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", ["source", "adopted, update"])
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
