"""The trainer's module replaces its tensors: workers see what it has now, and what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

import shmsync


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("later", None)


def assign_buffer(module):
    module.mean = 0.9 * module.mean + 1


def convert(module):
    module.double().float()


def load_assign(module):
    module.load_state_dict({key: t.clone() + 1 for key, t in module.state_dict().items()}, assign=True)


def new_submodule(module):
    module.lin = nn.Linear(3, 3)


def swap_dicts(module):
    other = Policy()
    module.__dict__["_buffers"] = other.__dict__["_buffers"]
    module.lin.__dict__["_parameters"] = other.lin.__dict__["_parameters"]


def set_data(module):
    module.lin.weight.data = torch.full((3, 3), 9.0).t()
    module.mean.data = torch.full((3,), 9.0)


def reorder(module):
    module.lin.weight.data = module.lin.weight.data.t()  # the same place, in another order


WAYS = [assign_buffer, convert, load_assign, new_submodule, swap_dicts, set_data, reorder]


def add_in_place(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)


def shown(sub):
    return {".".join(key) if isinstance(key, tuple) else key: t for key, t in sub.snapshot().weights.items(True, True)}


def assert_current(sub, module):
    seen = shown(sub)
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert torch.equal(seen[key], tensor), key


@pytest.fixture(params=["published", "adopted"])
def held(request, both):
    """held(module) -> its publisher, a subscriber, and send(): what the module has now becomes the next version."""

    def make(module):
        pub, sub = both(module)
        if request.param == "published":
            return pub, sub, pub.publish
        pub.adopt(module)

        def send():
            with pub.update():
                pass

        return pub, sub, send

    return make


@pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)
def test_workers_see_what_the_module_has_now(held, replace):
    module = Policy()
    pub, sub, send = held(module)
    for _ in range(2):
        replace(module)
        send()
        assert_current(sub, module)
        if send == pub.publish:
            add_in_place(module)
            send()
        else:
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
    for value in (3.0, 5.0):
        if value == 3.0:
            params["w"] = nn.Parameter(torch.full((2, 2), value))
        else:
            params["w"].data = torch.full((2, 2), value)
        pub.publish(params if how == "itself" else None)
        seen = shown(sub)
        assert torch.equal(seen["w"], params["w"]) and torch.equal(seen["b"], params["b"])


def leaf_less(module):
    module.mean = None


def buffer_more(module):
    module.later = torch.ones(3)


def other_shape(module):
    module.mean = torch.ones(1)  # copying it would broadcast


def other_dtype(module):
    module.mean = torch.ones(3, dtype=torch.float64)  # copying it would cast


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module.lin, "weight", nn.Identity())


MISFITS = [leaf_less, buffer_more, other_shape, other_dtype, parametrized]


@pytest.mark.parametrize("replace", MISFITS, ids=lambda way: way.__name__)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(held, replace):
    module = Policy()
    pub, sub, send = held(module)
    before = {key: tensor.clone() for key, tensor in shown(sub).items()}
    replace(module)
    for _ in range(2):
        with pytest.raises(shmsync.ManifestMismatch):
            send()
        assert pub.version == 1
        assert all(torch.equal(tensor, before[key]) for key, tensor in shown(sub).items())


def test_what_does_not_fit_inside_update_poisons_the_version(adopted):
    module = Policy()
    pub, _ = adopted(module)
    with pytest.raises(shmsync.ManifestMismatch, match=r"mean is \(3,\) in the arena but \(1,\)"), pub.update():
        module.mean = torch.ones(1)
    module.mean = torch.ones(3)
    with pytest.raises(shmsync.Poisoned), pub.update():
        pass
    assert pub.publish() == 2


def test_leaves_that_were_one_tensor_and_are_two_are_refused(publisher):
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = module[0].weight
    pub = publisher(module)
    apart = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    apart.load_state_dict(module.state_dict())  # equal values
    with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"):
        pub.adopt(apart)
    pub.adopt(module)
    module[1].weight = nn.Parameter(module[0].weight.detach().clone())
    with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"), pub.update():
        pass
