"""What the caller has switched on in torch changes nothing: each operation gives the same bytes under each mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shmsync.memory.torch_modes import plainly
from support.calls import switched
from support.weights import bytes_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), float(value)))
        self.strided = nn.Parameter(torch.full((4, 2), float(value)).t())
        self.register_buffer("mean", torch.full((2,), value + 0.5))
        self.register_buffer("count", torch.tensor(value))


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was seen by the caller's mode")


class Spoiling(TorchFunctionMode):
    """Whatever is made, is made of sevens."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.zeros, torch.Tensor.copy_, torch.Tensor.clone, torch.tensor):
            with torch._C.DisableTorchFunction():
                made.fill_(7)
        return made


MODES = {
    "none": contextlib.nullcontext,
    "set_default_device": lambda: switched(torch.set_default_device, "meta", None),
    "set_default_dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
    "TorchDispatchMode": Refusing,
    "TorchFunctionMode": Spoiling,
}


def _inside(transform):
    """Run a function inside a transform of torch.func."""

    def run(function):
        found = []

        def step(x):
            found.append(function())
            return x.sum()

        transform(step)
        return found[0]

    return run


def _under(mode):
    def run(function):
        with mode():
            return function()

    return run


def held(net):
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in net.parameters())
    return {name: tensor.detach() for name, tensor in (*net.named_parameters(), *net.named_buffers())}


WAYS = {name: _under(mode) for name, mode in MODES.items()} | {
    "vmap": _inside(lambda step: torch.vmap(step)(torch.ones(2, 2))),
}


# Each makes what it needs outside of the mode, then calls `way` with what is done under it; returns leaves to compare.


def new_publisher(arenas, way):
    net = Net(2)  # some leaves are cast, others copied
    return way(lambda: arenas.publisher(net, dtype={"weight": torch.bfloat16})).weights


def publish(arenas, way, **options):
    net = Net(2)
    pub = arenas.publisher(net, **options)
    with torch.no_grad():
        net.weight.fill_(3.0)
        net.strided.fill_(4.0)
    way(pub.publish)
    return pub.weights


def publish_a_mapping(arenas, way):
    pub = arenas.publisher(Net(2), slots=2)
    given = {"weight": torch.full((3, 4), 5.0), "strided": torch.full((4, 2), 6.0).t()}
    way(lambda: pub.publish(given))
    return pub.weights


def update(arenas, way):
    pub = arenas.publisher(Net(2), slots=2)
    new = torch.full((3, 4), 3.0)

    def step():
        with pub.update() as weights, plainly():  # what the user writes there is the user's own
            weights["weight"].copy_(new)

    way(step)
    return pub.weights


def adopt_and_close(arenas, way):
    net = Net(2)
    pub = arenas.publisher(Net(3))
    way(lambda: (pub.adopt(net), pub.close()))
    return held(net)


def attach(arenas, way):
    pub = arenas.publisher(Net(2))
    return way(lambda: arenas.subscriber(pub)).weights


def bind(arenas, way):
    sub = arenas.subscriber(arenas.publisher(Net(2)))
    net = Net(0)
    way(lambda: sub.bind(net, guard=False))
    return held(net)


def move(arenas, way):
    pub = arenas.publisher(Net(2), slots=2)
    sub = arenas.subscriber(pub)
    net = sub.bind(Net(0), guard=False)
    pub.publish(Net(3))
    way(sub.refresh)
    return held(net)


def snapshot(arenas, way):
    sub = arenas.subscriber(arenas.publisher(Net(2)))
    return way(sub.snapshot).weights


OPERATIONS = [
    new_publisher, publish, publish_a_mapping, update, adopt_and_close, attach, bind, move, snapshot,
]  # fmt: skip


def leaves(weights):
    """(dtype, shape, bytes) by name, and no inference tensor among them."""
    items = weights.items(True, True) if isinstance(weights, TensorDict) else weights.items()
    found = {}
    for name, leaf in items:
        assert type(leaf) in (torch.Tensor, nn.Parameter) and not leaf.is_inference() and leaf.is_leaf
        assert torch._C._dispatch_keys(leaf) == torch._C._dispatch_keys(torch.zeros(1))
        found[name] = leaf.dtype, tuple(leaf.shape), bytes_of({"leaf": leaf.detach()})
    return found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_gives_the_same_bytes(arenas, operation):
    expected = leaves(operation(arenas, WAYS["none"]))
    for name, way in WAYS.items():
        assert leaves(operation(arenas, way)) == expected, name
