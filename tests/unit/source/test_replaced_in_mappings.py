"""TensorDicts and mappings whose tensors are replaced: workers see what they hold now."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from support.zoo.replacing import shown, update


def replace_inner(source):
    source["a"] = {"w": torch.full((2,), 4.0)}


def replace_by_update(source):
    source.update({"b": torch.full((2,), 6.0)})


def select_in_place(source):
    if isinstance(source, TensorDict):
        source.select(("a", "w"), "b", inplace=True)
    source["a"]["w"], source["b"] = torch.full((2,), 7.0), torch.full((2,), 7.0)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("make", [TensorDict, dict])
@pytest.mark.parametrize("replace", [replace_inner, replace_by_update, select_in_place], ids=lambda f: f.__name__)
def test_what_holds_tensors_is_what_it_holds_now(both, replace, make, itself):
    source = make({"a": {"w": torch.zeros(2)}, "b": torch.zeros(2)})
    pub, sub = both(source)
    pub.publish(source if itself else None)
    replace(source)
    pub.publish(source if itself else None)
    assert torch.equal(shown(sub)["a.w"], source["a"]["w"]) and torch.equal(shown(sub)["b"], source["b"])


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
