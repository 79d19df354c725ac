"""Tensors that cannot be copied by address are refused wherever a tensor comes in, and nothing was written."""

from __future__ import annotations

import contextlib
import multiprocessing

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import nn

import shmsync
from shmsync.schemes import MultiProcessWeightSyncScheme, WeightStrategy
from support.odd_tensors import ODD

pytestmark = [
    pytest.mark.usefixtures("one_rank"),  # DTensors need a group
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


class Holder(nn.Module):
    """A module with a plain parameter, and `tensor` among its buffers or parameters."""

    def __init__(self, tensor):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        (self._parameters if isinstance(tensor, nn.Parameter) else self._buffers)["t"] = tensor


def good():
    return {"first": torch.zeros(2), "t": torch.zeros(4)}


def plain_of(tensor):
    """A plain tensor of the kind's dtype and shape, so that nothing else than the kind can be wrong with it."""
    shape = (2, 2) if tensor.layout is torch.sparse_csr else (4,)
    return torch.zeros(shape, dtype=tensor.dtype if tensor.dtype.is_floating_point else torch.float32)


@contextlib.contextmanager
def unchanged(look):
    """Whatever is raised inside, there is to be seen what there was."""
    before = look()
    try:
        yield
    finally:
        assert look() == before


def new_publisher(arenas, tensor):
    shmsync.Publisher({"first": torch.zeros(2), "t": tensor})


def publish_a_module(arenas, tensor):
    module = Holder(torch.zeros(4))
    pub = arenas.publisher(module)
    with torch.no_grad():
        module.first.fill_(1.0)
    for store in (module._parameters, module._buffers):
        store.pop("t", None)
    (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)["t"] = tensor
    with unchanged(lambda: (pub.version, pub.weights["first"].tolist())):
        pub.publish()


def adopt(arenas, tensor):
    module = Holder(tensor)
    with unchanged(module.first.data_ptr):
        arenas.publisher(good()).adopt(module)


def bind(arenas, tensor):
    module = Holder(tensor)
    with unchanged(module.first.data_ptr):
        arenas.subscriber(arenas.publisher(good())).bind(module, guard=False)


def apply(arenas, tensor):
    into = Holder(plain_of(tensor))
    with unchanged(into.first.tolist):
        WeightStrategy().apply_weights(into, {"first": torch.ones(2), "t": tensor})


def send_through_pipes(arenas, tensor):
    scheme = MultiProcessWeightSyncScheme()
    ours, theirs = multiprocessing.Pipe()
    scheme.init_on_sender("policy", pipes=[ours])
    try:
        scheme.get_sender().send({"first": torch.zeros(2), "t": tensor})
    finally:
        assert not theirs.poll()
        scheme.shutdown()


ENTRIES = [new_publisher, publish_a_module, adopt, bind, apply, send_through_pipes]


# bind() gives modules on the meta device their memory.
REFUSED = [pytest.param(k, e, id=f"{k}-{e.__name__}") for k in ODD for e in ENTRIES if (k, e) != ("meta", bind)]


@pytest.mark.parametrize(("kind", "entry"), REFUSED)
def test_is_refused_before_anything_is_written(arenas, kind, entry):
    make, said = ODD[kind]
    with pytest.raises(ValueError, match=said) as refused:
        entry(arenas, make())
    assert isinstance(refused.value, shmsync.ManifestMismatch)


class Marked(torch.Tensor):
    """A subclass over plain memory."""


KINDS = {
    "subclass": lambda: torch.arange(4.0).as_subclass(Marked),
    "buffer": lambda: nn.Buffer(torch.arange(4.0)),
    "expanded": lambda: torch.arange(4.0)[None].expand(3, 4)[1],
    "strided": lambda: torch.arange(8.0)[::2],
    "part of a storage": lambda: torch.arange(-3.0, 9.0)[3:7],
    "requires grad": lambda: torch.arange(4.0, requires_grad=True) * 1,
    "negated": lambda: torch._neg_view(-torch.arange(4.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_memory_of_any_type_is_published(publisher, kind):
    pub = publisher({"t": torch.zeros(4)})
    expected = KINDS[kind]().tolist()
    for _ in range(3):  # a plan is made, and found again
        pub.publish({"t": torch.full((4,), -1.0)})
        assert pub.weights["t"].tolist() == [-1] * 4
        pub.publish({"t": KINDS[kind]()})
        assert pub.weights["t"].tolist() == expected
    with torch.inference_mode():
        made_in_inference_mode = KINDS[kind]()
    pub.publish({"t": made_in_inference_mode + 1})
    assert pub.weights["t"].tolist() == [value + 1 for value in expected]


def test_what_is_no_tensor_in_a_tensordict_is_named():
    source = TensorDict({"t": torch.ones(2), "inner": {"name": NonTensorData("policy")}}, batch_size=[])
    with pytest.raises(shmsync.ManifestMismatch, match=r"inner.name is a NonTensorData.*exclude="):
        shmsync.Publisher(source)


@pytest.mark.parametrize("dtype", [None, {"*": torch.float64}], ids=["as bytes", "cast"])
def test_a_source_that_moves_into_the_slab_is_refused(publisher, dtype):
    source = nn.Module()
    source.t = nn.Parameter(torch.ones(64))
    pub = publisher(source, slots=2, dtype=dtype)
    for _ in range(2):
        pub.publish(source)
    source.t.data = pub.weights["t"].view(torch.float32)[:64]
    for _ in range(2):
        with pytest.raises(shmsync.ManifestMismatch, match="inside arena"):
            pub.publish(source)
