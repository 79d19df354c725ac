"""partial=True: weights may lack leaves, and only those that are given change. In every scheme."""

import select

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync.errors import ManifestMismatch, WorkerDied
from shmsync.schemes import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from shmsync.schemes.link.connection import Channel
from support.calls import Call, naming
from support.conformance.nets import Stamped, Tied, ask, held, leaf
from support.conformance.rigs import KINDS, Address, CallRig, CallScheme, PipeRig, rigs
from support.conformance.table import in_processes, over_pipes

WAYS = {
    "own": ("own", {}),
    "mp": ("mp", {}),
    "mp-tensordict": ("mp", {"strategy": "tensordict"}),
    "shm-1": ("shm", {}),
    "shm-2": ("shm", {"slots": 2}),
    "shm-3-optimistic": ("shm", {"slots": 3, "consistency": "optimistic"}),
    "shm-groups": ("shm", {"groups": [[0], [1]]}),
    "call": ("call", {}),
    "call-fan-out": ("call", {"fan_out": "node"}),
    "call-fan-out-2": ("call", {"fan_out": "node", "slots": 2}),
}


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def make(way):
    """Makes a rig of this kind."""
    name, own = WAYS[way]
    with rigs(name, {"partial": True, **own}) as make:
        yield make


def is_one(rig, **values):
    for net in rig.nets:
        assert held(net) == {name.replace("__", "."): float(value) for name, value in values.items()}
    return True


FORMS = {
    "state_dict": lambda weights: weights,
    "nested": lambda weights: TensorDict(weights).unflatten_keys(".").to_dict(),
    "tensordict": lambda weights: TensorDict(weights).unflatten_keys("."),
    "flat tensordict": lambda weights: TensorDict(weights),
}


@pytest.mark.parametrize("form", FORMS)
def test_only_the_given_leaves_change(make, form):
    rig = make()
    rig.deliver(Stamped(1))
    rig.deliver(FORMS[form](leaf(2)))
    assert is_one(rig, layer__weight=1, layer__bias=2, count=1)
    rig.deliver(FORMS[form]({**leaf(3, "count"), **leaf(4, "layer.weight")}))
    assert is_one(rig, layer__weight=4, layer__bias=2, count=3)
    rig.deliver(Stamped(5))
    assert is_one(rig, layer__weight=5, layer__bias=5, count=5)


def test_module_may_lack_leaves_too(make):
    rig = make()
    rig.deliver(Stamped(1))
    part = nn.Module()
    part.layer = nn.Linear(4, 2)
    nn.init.constant_(part.layer.weight, 7)
    nn.init.constant_(part.layer.bias, 7)
    rig.deliver(part)
    assert is_one(rig, layer__weight=7, layer__bias=7, count=1)


WRONG = {
    "unexpected": ({"layer.extra": torch.zeros(2)}, r"layer\.extra"),
    "shape": ({"layer.bias": torch.zeros(3)}, r"layer\.bias"),
    "dtype": ({"count": torch.zeros(3, dtype=torch.int32)}, r"count is torch\.int64"),
    "nothing": ({}, r"leaf|leaves"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(make, way, wrong):
    rig = make()
    rig.deliver(Stamped(1))
    weights, named = WRONG[wrong]
    with pytest.raises(ManifestMismatch, match=named):
        rig.deliver({**leaf(2, "layer.weight"), **weights} if weights else {})
    assert is_one(rig, layer__weight=1, layer__bias=1, count=1)
    if way != "own":  # there a worker's receive() raises, and the rest of this send is still to be received
        rig.deliver(leaf(3))  # the scheme goes on
        assert is_one(rig, layer__weight=1, layer__bias=3, count=1)


@pytest.mark.parametrize("wrong", WRONG)
def test_strategy_refuses_by_name_and_writes_nothing(wrong):
    net, (weights, named) = Stamped(1), WRONG[wrong]
    with pytest.raises(ManifestMismatch, match=named):
        WeightStrategy(partial=True).apply_weights(net, {**leaf(2, "layer.weight"), **weights} if weights else {})
    assert ask(net) == 1


def test_first_weights_may_be_a_part_and_say_which_leaves_an_arena_has(make, way):
    rig = make()
    for value in (2, 3):
        rig.deliver(leaf(value))
        assert is_one(rig, layer__weight=0, layer__bias=value, count=0)
    if "shm" in way or "fan-out" in way:
        with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
            rig.deliver(leaf(5, "layer.weight"))
        assert is_one(rig, layer__weight=0, layer__bias=3, count=0)
    else:
        rig.deliver(leaf(5, "layer.weight"))
        assert is_one(rig, layer__weight=5, layer__bias=3, count=0)


# ---- workers that have missed some


ALONE = {"mp": {}, "shm": {"groups": [[0], [1]]}, "call": {}}


@pytest.fixture(params=ALONE)
def alone(request):
    """A rig whose workers can be reached one by one."""
    with rigs(request.param, {"partial": True, **ALONE[request.param]}) as make:
        yield make()


def test_worker_that_was_left_out_keeps_its_values(alone):
    alone.deliver(Stamped(1))
    alone.deliver(leaf(2), [0])
    alone.deliver(leaf(3, "count"))
    assert held(alone.nets[0]) == {"layer.weight": 1, "layer.bias": 2, "count": 3}
    assert held(alone.nets[1]) == {"layer.weight": 1, "layer.bias": 1, "count": 3}


def test_new_worker_gets_whole_weights_with_its_first_send(alone):
    alone.deliver(Stamped(1), [0])
    alone.deliver(leaf(2), [0])
    alone.deliver(leaf(3, "count"))
    for net in alone.nets:
        assert held(net) == {"layer.weight": 1, "layer.bias": 2, "count": 3}


@pytest.mark.parametrize("kind", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_resend_brings_a_late_joiner_whole_weights(kind, rig_of):
    rig = rig_of(PipeRig, kind, partial=True)
    rig.deliver(Stamped(1))
    rig.deliver(leaf(2))
    late = rig.join(Stamped(0))
    assert rig.receive_until(Call(rig.sender.resend, 2, timeout=60), [2]) == 2
    assert held(late) == {"layer.weight": 1, "layer.bias": 2, "count": 1}
    rig.deliver(leaf(3, "count"))
    for net in (*rig.nets, late):
        assert held(net) == {"layer.weight": 1, "layer.bias": 2, "count": 3}


@pytest.mark.parametrize("kind", ["mp", "shm", "call"])
def test_late_worker_loses_no_leaf(kind, rig_of):
    rig = rig_of(KINDS[kind][0], KINDS[kind][1], partial=True)
    rig.deliver(Stamped(1))
    if kind == "call":
        rig.pipes[1].silent = True
    for weights in (leaf(2), leaf(3, "count")):
        rig.sender.send_async(weights)
        rig.receivers[0].receive(timeout=0.05)
        with naming(TimeoutError, [1]):
            rig.sender.wait_async(timeout=0.1)
    if kind == "call":
        rig.pipes[1].silent = False
    rig.deliver(leaf(4, "layer.weight"))
    for net in rig.nets:
        assert held(net) == {"layer.weight": 4, "layer.bias": 2, "count": 3}


def test_leaves_that_are_one_tensor_stay_so_for_whoever_joins_late(rig_of):
    rig = rig_of(PipeRig, MultiProcessWeightSyncScheme, partial=True, nets=[Tied(0), Stamped(0)])
    rig.deliver(Tied(1), [0])
    rig.deliver({"tied.weight": torch.full((2, 2), 2.0)}, [0])
    rig.deliver({"layer.weight": torch.full((2, 2), 3.0)}, [0])
    late = rig.join(Tied(0))
    assert rig.receive_until(Call(rig.sender.resend, 2, timeout=60), [2]) == 3
    rig.deliver({"tied.bias": torch.full((2,), 4.0)}, [0, 2])
    expected = {"layer.weight": 3, "tied.weight": 3, "layer.bias": 1, "tied.bias": 4, "count": 1}
    assert held(late) == held(rig.nets[0]) == expected


def test_who_refuses_a_resend_changes_nothing_for_others(rig_of):
    rig = rig_of(PipeRig, MultiProcessWeightSyncScheme, partial=True)
    rig.deliver(Stamped(1))
    rig.deliver(leaf(2))
    misfit = rig.join(Stamped(0, width=7))
    with pytest.raises(ManifestMismatch):
        rig.receive_until(Call(rig.sender.resend, 2, timeout=60))
    late = rig.join(Stamped(0))
    assert rig.receive_until(Call(rig.sender.resend, 3, timeout=60)) == 2
    assert held(late) == held(rig.nets[0]) == {"layer.weight": 1, "layer.bias": 2, "count": 1}
    with pytest.raises(ManifestMismatch):  # it still lacks the rest, and refuses again
        rig.deliver(leaf(3, "count"))
    assert held(misfit) == {"layer.weight": 0, "layer.bias": 0, "count": 0}


def test_parts_of_two_senders_never_take_each_others_place(rig_of):
    rig = rig_of(PipeRig, MultiProcessWeightSyncScheme, partial=True)
    other = MultiProcessWeightSyncScheme(partial=True)
    other.init_on_sender("policy", **rig.addresses())
    rig.deliver({**Stamped(1).state_dict()})
    for pipe in rig.pipes[::2]:  # full, so that no byte of the next messages leaves at once
        while select.select([], [pipe], [], 0)[1]:
            Channel.of(pipe).send(b"\x80\x04N." + bytes(1 << 18))
    rig.sender.send_async(leaf(2))
    assert rig.receive_until(Call(other.get_sender().send, leaf(3, "count"), timeout=60)) == 3
    rig.sender.wait_async(timeout=60)
    assert is_one(rig, layer__weight=1, layer__bias=2, count=3)
    other.shutdown()


def test_new_relay_gets_whole_weights(rig_of):
    rig = rig_of(CallRig, CallScheme, partial=True, fan_out="node")
    for address in rig.pipes:
        address.node = "far"
    rig.deliver(Stamped(1))
    rig.deliver(leaf(2))
    other = Stamped(0)
    worker = CallScheme(partial=True, fan_out="node")
    worker.init_on_worker("policy", model=other)
    rig.workers.append(worker)
    rig.pipes.append(Address(worker.get_receiver(), "farther"))
    rig.deliver(leaf(3, "count"))
    for net in (*rig.nets, other):
        assert held(net) == {"layer.weight": 1, "layer.bias": 2, "count": 3}


# ---- aliased


def test_part_of_an_aliased_module(rig_of):
    rig, net = rig_of(PipeRig, SharedMemWeightSyncScheme, partial=True, alias=True), Stamped(1)
    rig.deliver(net)
    rig.deliver(leaf(2))
    assert is_one(rig, layer__weight=1, layer__bias=2, count=1)


# ---- options


@pytest.mark.parametrize("kind", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, CallScheme, WeightStrategy])
@pytest.mark.parametrize("given", [1, "yes", None])
def test_partial_is_true_or_false(kind, given):
    with pytest.raises(TypeError, match=f"partial is True or False, not {given!r}"):
        kind(partial=given)


@pytest.mark.parametrize("kind", [NoWeightSyncScheme, WeightSyncScheme])
def test_every_scheme_takes_the_options(kind):
    kind = type("Any", (kind,), {"create_transport": lambda self, pipe: None})
    scheme = kind(partial=True, dtype=torch.bfloat16)
    assert (scheme.partial, scheme.dtype) == (True, torch.bfloat16)


# ---- with real workers, of every scheme


@over_pipes
@in_processes
def test_part_that_was_sent_while_a_worker_died_reaches_the_one_in_its_place(fleet):
    sender = fleet.open(partial=True)
    sender.send(Stamped(1))
    fleet.workers[2].kill()
    with pytest.raises(WorkerDied):
        sender.send(leaf(3, "count"))
    fleet.replace(2)
    fleet.join(2, fleet.schemes[0])
    fleet.register(sender, 2)
    assert sender.resend(2) == sender.version
    assert fleet.stamps() == [(1, 3)] * 3
