"""The trainer's module replaces its tensors by what does not fit the arena."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync
from support.zoo.replacing import Held, Policy, shown


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
@pytest.mark.parametrize("how", ["source", "adopted, update"])
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
