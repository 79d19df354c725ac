"""partial=True: a send may lack leaves, and only those that it has change. resend() sends all of them."""

import pytest
import torch
from tensordict import TensorDict

from shmsync.errors import ManifestMismatch
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightStrategy
from support.calls import Call
from support.conformance.nets import Stamped, Tied, held
from support.conformance.rigs import KINDS, PipeRig, rigs

PIPES = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]


def leaf(value, name="layer.bias"):
    """One leaf of a Stamped, alone."""
    return {name: Stamped(value).state_dict()[name]}


@pytest.fixture(params=KINDS)
def way(request):
    return request.param


@pytest.fixture
def rig(way):
    with rigs(way, {"partial": True}) as make:
        yield make()


def each_is(rig, **values):
    for net in rig.nets:
        assert held(net) == {name.replace("__", "."): float(value) for name, value in values.items()}


def test_only_the_given_leaves_change(rig):
    rig.deliver(Stamped(1))
    rig.deliver(leaf(2))
    each_is(rig, layer__weight=1, layer__bias=2, count=1)
    rig.deliver(TensorDict({**leaf(3, "count"), **leaf(4, "layer.weight")}).unflatten_keys("."))
    each_is(rig, layer__weight=4, layer__bias=2, count=3)
    rig.deliver(Stamped(5))
    each_is(rig, layer__weight=5, layer__bias=5, count=5)


WRONG = {
    "unexpected": ({"layer.extra": torch.zeros(2)}, r"layer\.extra"),
    "shape": ({"layer.bias": torch.zeros(3)}, r"layer\.bias"),
    "dtype": ({"count": torch.zeros(3, dtype=torch.int32)}, r"count is torch\.int64"),
    "nothing": ({}, r"leaf|leaves"),
}


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(way):
    with rigs(way, {"partial": True}) as make:
        for weights, named in WRONG.values():
            rig = make()
            rig.deliver(Stamped(1))
            with pytest.raises(ManifestMismatch, match=named):
                rig.deliver({**leaf(2, "layer.weight"), **weights} if weights else {})
            each_is(rig, layer__weight=1, layer__bias=1, count=1)
            if way != "own":  # there a worker's receive() raises, and the rest of this send is still to be received
                rig.deliver(leaf(3))
                each_is(rig, layer__weight=1, layer__bias=3, count=1)


def test_first_weights_may_be_a_part_and_say_which_leaves_an_arena_has(rig, way):
    rig.deliver(leaf(2))
    each_is(rig, layer__weight=0, layer__bias=2, count=0)
    if way == "shm":
        with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
            rig.deliver(leaf(5, "layer.weight"))
    else:
        rig.deliver(leaf(5, "layer.weight"))
        each_is(rig, layer__weight=5, layer__bias=2, count=0)


@pytest.mark.parametrize("kind", PIPES)
def test_resend_brings_everything(kind, rig_of):
    whole = Stamped(1)
    rig = rig_of(PipeRig, kind, partial=True, given={"model": whole})
    rig.deliver()
    rig.deliver(leaf(2))
    whole.load_state_dict({**whole.state_dict(), **leaf(2)})
    late = rig.join(Stamped(0))
    assert rig.receive_until(Call(rig.sender.resend, 2, timeout=60), [2])
    assert held(late) == {"layer.weight": 1, "layer.bias": 2, "count": 1}
    rig.deliver(leaf(3, "count"))
    rig.nets.append(late)
    each_is(rig, layer__weight=1, layer__bias=2, count=3)


def test_leaves_that_are_one_tensor_change_as_one(rig_of):
    rig = rig_of(PipeRig, MultiProcessWeightSyncScheme, partial=True, nets=[Tied(0)])
    rig.deliver(Tied(1))
    rig.deliver({"tied.weight": torch.full((2, 2), 2.0)})
    assert held(rig.nets[0]) == {"layer.weight": 2, "tied.weight": 2, "layer.bias": 1, "tied.bias": 1, "count": 1}


@pytest.mark.parametrize("kind", [*PIPES, WeightStrategy])
def test_partial_is_true_or_false(kind):
    with pytest.raises(TypeError, match="partial is True or False, not 1"):
        kind(partial=1)
