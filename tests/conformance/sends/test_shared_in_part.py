"""A worker's buffer that is a view of some rows of a parameter: the same over pipes and shared memory."""

import pytest
import torch
from torch import nn

from shmsync.errors import ManifestMismatch
from support.conformance.rigs import rigs


class Rows(nn.Module):
    def __init__(self, value, rows):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        nn.init.constant_(self.layer.weight, value)
        nn.init.constant_(self.layer.bias, value)
        self.register_buffer("rows", self.layer.weight.data[:rows])

    def forward(self):
        return None


def held(net):
    with torch.no_grad():
        net()
    return {name: each.flatten().tolist() for name, each in net.state_dict().items()}


@pytest.fixture(params=["mp", "shm", "call"])
def make(request):
    """Makes a rig of this kind."""
    with rigs(request.param, {}) as make:
        yield make


def test_part_that_would_change_some_of_another_leaf_is_refused(make):
    rig = make(nets=[Rows(0, 1), Rows(0, 1)], partial=True)
    with pytest.raises(ManifestMismatch, match="rows and layer.weight share memory in part"):
        rig.deliver(Rows(1, 1))
    assert held(rig.nets[0])["layer.weight"] == [0] * 4


def test_view_of_the_whole_is_another_name(make):
    rig = make(nets=[Rows(0, 2), Rows(0, 2)], partial=True)
    rig.deliver(Rows(1, 2))
    for part in ({"rows": torch.full((2, 2), 2.0)}, {"layer.weight": torch.full((2, 2), 3.0)}):
        rig.deliver(part)
        value = float(next(iter(part.values())).max())
        assert [held(net) for net in rig.nets] == [
            {"layer.weight": [value] * 4, "layer.bias": [1] * 2, "rows": [value] * 4}
        ] * 2
