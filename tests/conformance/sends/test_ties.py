"""Tied tensors, through pipes and shared memory alike: names that weights lack."""

import pytest
from torch import nn

from shmsync.errors import ManifestMismatch
from support.conformance.nets import Tied, held


class Apart(Tied):
    """The same names, but nothing is tied."""

    def __init__(self, value=0):
        super().__init__(value)
        self.tied.weight = nn.Parameter(self.layer.weight.detach().clone())


pytestmark = pytest.mark.parametrize("kind", ["mp", "shm"], indirect=True)


def single(net):
    """Its weights as a checkpoint that saves shared tensors once has them."""
    return {name: each for name, each in net.state_dict().items() if name != "tied.weight"}


def all_of(value, **others):
    names = Tied(0).state_dict()
    return {name: float(others.get(name.replace(".", "__"), value)) for name in names}


def test_first_weights_may_lack_the_second_name_of_a_tied_tensor(make):
    rig = make(nets=[Tied(0), Tied(0)])
    for value in (1, 2):
        rig.deliver(single(Tied(value)))
        assert [held(net) for net in rig.nets] == [all_of(value)] * 2
    rig.deliver(Tied(3))
    rig.deliver(Tied(4).state_dict())
    rig.deliver(single(Tied(5)))
    assert [held(net) for net in rig.nets] == [all_of(5)] * 2


def test_worker_without_the_tie_is_refused_by_name(make):
    rig = make(nets=[Tied(0), Apart(0)])
    with pytest.raises(ManifestMismatch, match=r"tied\.weight"):
        rig.deliver(single(Tied(1)))
    assert held(rig.nets[1]) == all_of(0)
