"""What the caller has switched on in torch changes nothing: each operation gives the same bytes under each mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shmsync.memory.torch_modes import plainly
from support.weights import bytes_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), float(value)))
        self.strided = nn.Parameter(torch.full((4, 2), float(value)).t())
        self.register_buffer("mean", torch.full((2,), value + 0.5))
        self.register_buffer("count", torch.tensor(value))


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MODES = {
    "set_default_device": lambda: torch.device("meta"),
    "set_default_dtype": default_dtype,
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
}


# Each makes what it needs outside of the mode, then does its work under it; returns leaves to compare.


def publish(arenas, mode):
    net = Net(2)
    pub = arenas.publisher(net, slots=2)
    with torch.no_grad():
        net.weight.fill_(3.0)
        net.strided.fill_(4.0)
    with mode():
        pub.publish()
        pub.publish({"weight": net.weight, "strided": net.strided})
    return pub.weights


def new_publisher(arenas, mode):
    net = Net(2)  # some leaves are cast, others copied
    with mode():
        return arenas.publisher(net, dtype={"weight": torch.bfloat16}).weights


def update_what_is_adopted(arenas, mode):
    net, pub, new = Net(2), arenas.publisher(Net(3)), torch.full((3, 4), 3.0)
    with mode():
        pub.adopt(net)
        with pub.update() as weights, plainly():  # what the user writes there is the user's own
            weights["weight"].copy_(new)
        pub.close()
    return held(net)


def bind_and_move(arenas, mode):
    pub, net = arenas.publisher(Net(2), slots=2), Net(0)
    with mode():
        sub = arenas.subscriber(pub)
        sub.bind(net, guard=False)
    pub.publish(Net(3))
    with mode():
        sub.refresh()
    return held(net)


def snapshot(arenas, mode):
    sub = arenas.subscriber(arenas.publisher(Net(2)))
    with mode():
        return sub.snapshot().weights


def held(net):
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in net.parameters())
    return {name: tensor.detach() for name, tensor in (*net.named_parameters(), *net.named_buffers())}


def leaves(weights):
    """(dtype, shape, bytes) by name, and no inference tensor among them."""
    found = {}
    for name, leaf in weights.items():
        assert type(leaf) in (torch.Tensor, nn.Parameter) and not leaf.is_inference() and leaf.is_leaf
        found[name] = leaf.dtype, tuple(leaf.shape), bytes_of({"leaf": leaf.detach()})
    return found


@pytest.mark.parametrize("operation", [publish, new_publisher, update_what_is_adopted, bind_and_move, snapshot])
def test_gives_the_same_bytes(arenas, operation):
    expected = leaves(operation(arenas, contextlib.nullcontext))
    for name, mode in MODES.items():
        assert leaves(operation(arenas, mode)) == expected, name
