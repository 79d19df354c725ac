"""A worker's module on another device than the arena: it gets a private copy of each version, and never a torn one.

The decision is is_elsewhere(). Most tests give modules in CPU memory the same treatment, so that they run anywhere.
"""

import gc

import pytest
import torch

from shmsync import Publisher, Subscriber
from shmsync.schemes import SharedMemWeightSyncScheme
from shmsync.schemes.arenas import subscriptions
from support.calls import meanwhile
from support.conformance.nets import Stamped, ask
from support.conformance.rigs import CallRig, CallScheme, PipeRig
from support.devices.simulated import Simulated, installed
from support.jobs.engine import bind_copies

RIGS = {"shm": (PipeRig, SharedMemWeightSyncScheme, {}), "fan-out": (CallRig, CallScheme, {"fan_out": "node"})}
SLOTS = [("pinned", 1), ("pinned", 2), ("pinned", 3), ("optimistic", 1), ("optimistic", 2)]


@pytest.fixture
def elsewhere(monkeypatch):
    """Every module is treated as if it were on another device."""
    monkeypatch.setattr(subscriptions, "is_elsewhere", lambda model, device: True)


@pytest.mark.parametrize(("consistency", "slots"), SLOTS)
@pytest.mark.parametrize("copies", [False, True])
def test_a_scheme_puts_its_arena_on_a_device(copies, consistency, slots):
    with installed(Simulated(5, 0.0005)):
        made = PipeRig(SharedMemWeightSyncScheme, consistency=consistency, slots=slots, device="simulated:0")
        addresses = set()
        for net in made.nets:
            net.to("cpu" if copies else "simulated:0")
        for value in (1, 2, 3):
            made.deliver(Stamped(value))
            assert made.stamps() == [value, value]
            addresses.add(made.nets[0].layer.weight.data_ptr())
            assert {net.layer.weight.is_cpu for net in made.nets} == {copies}
        assert len(addresses) == 1 or (slots > 1 and not copies)  # the addresses of slots=1 never move
        made.close()
        gc.collect()


@pytest.mark.parametrize("device", ["mps", 3])
def test_a_scheme_refuses_a_device_where_no_arena_can_lie(device):
    with pytest.raises((TypeError, ValueError), match="device"):
        SharedMemWeightSyncScheme(device=device)


class OnGPU(torch.Tensor):
    """Says that it lies on another device."""

    device = torch.device("cuda", 0)


def test_decision_looks_at_every_tensor():
    net, cpu = Stamped(1), torch.device("cpu")
    assert not subscriptions.is_elsewhere(net, cpu)
    assert not subscriptions.is_elsewhere(Stamped(1).to("meta"), cpu)
    net.register_buffer("far", torch.zeros(1).as_subclass(OnGPU))
    assert subscriptions.is_elsewhere(net, cpu)


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize(("consistency", "slots"), SLOTS)
def test_module_gets_a_private_copy_per_version(elsewhere, rig, consistency, slots):
    kind, scheme, options = RIGS[rig]
    made = kind(scheme, consistency=consistency, slots=slots, **options)
    before = [[id(tensor) for tensor in net.parameters()] for net in made.nets]
    for value in (1, 2, 3):
        made.deliver(Stamped(value))
        assert made.stamps() == [value, value]
    assert [[id(tensor) for tensor in net.parameters()] for net in made.nets] == before
    first, second = (net.layer.weight for net in made.nets)
    assert first.data_ptr() != second.data_ptr()
    with torch.no_grad():
        first.fill_(9)  # its own memory: in an arena this would end the process
    assert made.stamps()[1] == 3
    made.deliver(Stamped(4))
    assert made.stamps() == [4, 4]
    made.close()
    gc.collect()


@pytest.mark.parametrize(("consistency", "slots"), SLOTS)
def test_forward_sees_whole_versions_while_the_trainer_writes(consistency, slots):
    with Publisher(Stamped(1), slots=slots) as pub, Subscriber(pub.handle, consistency=consistency) as sub:
        net = bind_copies(sub, Stamped(0))
        seen = []
        with meanwhile(lambda: seen.append(ask(net))):
            for value in range(2, 400):
                pub.publish(Stamped(value), timeout=60)
        assert seen and all(isinstance(value, int) for value in seen)  # a pair would be two versions
        assert seen == sorted(seen)
        assert ask(net) == 399
