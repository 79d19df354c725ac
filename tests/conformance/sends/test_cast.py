"""dtype=: floating leaves are cast before they travel, then shapes and dtypes are checked. In every scheme."""

import pytest
import torch
from tensordict import TensorDict

from shmsync.errors import ManifestMismatch
from support.conformance.nets import Stamped
from support.conformance.rigs import rigs


class Brief(Stamped):
    """Of bfloat16."""

    def __init__(self, value=0):
        super().__init__(value)
        self.to(torch.bfloat16)


PRECISE = 1.001  # which bfloat16 has not


def trainer():
    return precise(Stamped(0))


def precise(net):
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.fill_(PRECISE)
        net.count.fill_(3)
    return net


FORMS = {
    "module": lambda net: net,
    "state_dict": lambda net: net.state_dict(),
    "tensordict": lambda net: TensorDict.from_module(net).data,
}


@pytest.fixture
def make(kind):
    """Makes a rig of this kind, whose workers' models are of a given class."""
    with rigs(kind) as make:
        yield lambda model, **options: make(nets=[model(), model()], **options)


def check(net, dtype=torch.bfloat16):
    with torch.no_grad():
        net()
    wanted = torch.tensor(PRECISE).to(dtype)
    assert {tensor.dtype for tensor in net.parameters()} == {dtype}
    assert all((tensor == wanted).all() for tensor in net.parameters())
    assert net.count.dtype == torch.int64 and net.count.tolist() == [3, 3, 3]


def test_workers_get_cast_values(make):
    rig, net = make(Brief, dtype=torch.bfloat16), trainer()
    for form in FORMS.values():
        rig.deliver(form(net))
        rig.deliver(form(net))
        for each in rig.nets:
            check(each)
    assert {tensor.dtype for tensor in net.parameters()} == {torch.float32}  # the trainer's own stay as they are
    assert net.layer.weight[0, 0] == torch.tensor(PRECISE)


def test_without_a_cast_another_dtype_is_refused_by_name(make):
    rig = make(Brief)
    with pytest.raises(ManifestMismatch, match=r"layer\.weight is torch\.(float32|bfloat16)"):
        rig.deliver(trainer())
    for net in rig.nets:
        assert not net.layer.weight.any()
