"""The trainer's module replaces its tensors by what does not fit the arena, or would cost another tensor its values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from support.zoo.replacing import HOLDS, Held, Policy, assert_current, shown


def leaf_more(module):
    module.extra = nn.Parameter(torch.ones(1))


def leaf_less(module):
    module.mean = None


def submodule_more(module):
    module.more = nn.Linear(3, 3)


def buffer_more(module):
    module.later = torch.ones(3)


def other_shape(module):
    module.mean = torch.ones(1)  # copying it would broadcast


def other_shape_in_place(module):
    module.mean.data = torch.ones(1)


def other_dtype(module):
    module.mean = torch.ones(3, dtype=torch.float64)  # copying it would cast


def parameter_of_another_dtype(module):
    module.lin.half()


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module.lin, "weight", nn.Identity())


def lazy(module):
    module.lin = nn.LazyLinear(3)


def tied(module):
    module.lin.bias = module.norm.bias  # two leaves of the arena, one tensor


MISFITS = [
    leaf_more, leaf_less, submodule_more, buffer_more, other_shape, other_shape_in_place, other_dtype,
    parameter_of_another_dtype, parametrized, lazy,
]  # fmt: skip


@pytest.mark.parametrize("replace", MISFITS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", HOLDS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(publisher, subscriber, how, replace):
    module = Policy()
    held = Held(publisher, module, how)
    sub = subscriber(held.pub)
    before = {key: tensor.clone() for key, tensor in shown(sub).items()}
    replace(module)
    for _ in range(2):
        with pytest.raises(shmsync.ManifestMismatch):
            held.send()
        assert held.pub.version == 1
        assert all(torch.equal(tensor, before[key]) for key, tensor in shown(sub).items())
    held.close()


def test_what_does_not_fit_inside_update_poisons_the_version(adopted):
    module = Policy()
    pub, _ = adopted(module)
    with pytest.raises(shmsync.ManifestMismatch, match=r"mean is \(3,\) in the arena but \(1,\)"), pub.update():
        module.mean = torch.ones(1)
    module.mean = torch.ones(3)
    with pytest.raises(shmsync.Poisoned), pub.update():
        pass
    assert pub.publish() == 2


def test_leaves_that_become_one_tensor_are_refused_by_an_adopting_arena(adopted):
    module = Policy()
    pub, _ = adopted(module)
    tied(module)
    with (
        pytest.raises(shmsync.ManifestMismatch, match="lin.bias and norm.bias are separate in the arena"),
        pub.update(),
    ):
        pass


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


def swapped_out(module):
    other = nn.Parameter(torch.full((3, 3), 5.0))
    torch.utils.swap_tensors(module.lin.weight, other)  # `other` is the one that was adopted
    return other


def backup(module):
    kept = module.lin.weight.data
    module.lin.weight.data = torch.full((3, 3), 5.0)  # a moving average, for a while
    return kept


def row(module):
    kept = module.lin.weight.detach()[0]
    module.lin.weight = nn.Parameter(torch.full((3, 3), 5.0))
    return kept


@pytest.mark.parametrize("take", [swapped_out, backup, row])
@pytest.mark.parametrize("how", ["publish", "update", "step"])
def test_a_place_that_a_tensor_outside_the_module_shows_is_not_overwritten(adopted, how, take):
    module = Policy()
    pub, sub = adopted(module)

    def call():
        if how == "publish":
            pub.publish()
        else:
            with pub.update():
                if how == "step":
                    torch.optim.SGD(module.parameters(), lr=1.0).step()

    kept = take(module)
    value = kept.detach().clone()
    with pytest.raises(shmsync.ProtocolError, match="lin.weight of the adopted module would overwrite memory"):
        call()
    assert torch.equal(kept, value) and pub.version == 1
    assert torch.equal(sub.snapshot().weights["lin", "weight"].flatten()[: value.numel()], value.flatten())
    del kept
    call()
    assert_current(sub, module)
    pub.close()
    assert (module.lin.weight == 5).all()
