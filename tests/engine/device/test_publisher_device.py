"""Where an arena lies, and how weights come there: from the host, from its own device, and from another one.

Two simulated devices (support/devices/simulated.py): what they are asked for is done late, in the order of each stream.
"""

import time

import pytest
import torch

import shmsync
from support.devices.simulated import Simulated, installed

SIZE = (24, 10)
PLACES = ["cpu", "simulated:0", "simulated:1"]


@pytest.fixture
def two():
    first, second = Simulated(3, 0.0005), Simulated(4, 0.0005, index=1)
    with installed(first, second):
        yield {"cpu": None, first.name: first, second.name: second}


def made(place, two, value, shape=SIZE):
    values = torch.full(shape, float(value))
    return values if two[place] is None else two[place].tensor(values)


def seen(sub):
    with sub.read() as section:
        return {".".join(key) if isinstance(key, tuple) else key: set(tensor.flatten().tolist())
                for key, tensor in section.weights.items(True, True)}  # fmt: skip


def lies(pub):
    return pub._writer.arena.place


@pytest.mark.parametrize("place", ["cpu", "simulated:0"])
def test_without_a_name_the_arena_lies_in_the_hosts_memory(two, place):
    with shmsync.Publisher({"a": made(place, two, 1), "b": made("cpu", two, 1)}) as pub:
        assert lies(pub) == "cpu"
        for version, source in enumerate(PLACES, 2):
            assert pub.publish({"a": made(source, two, version)}) == version
            with shmsync.Subscriber(pub.handle) as sub:
                assert seen(sub)["a"] == {float(version)}


@pytest.mark.parametrize(
    ("source", "mixed", "dtype", "slots"),
    [("cpu", False, torch.bfloat16, 1), ("simulated:0", True, None, 2), ("simulated:0", False, torch.bfloat16, 1),
     ("simulated:1", False, None, 2)],
)  # fmt: skip
@pytest.mark.parametrize("place", PLACES)
def test_weights_come_from_anywhere_in_the_order_in_which_they_are_made(two, place, source, mixed, dtype, slots):
    there, whole, host = two[source], made(source, two, 1, (24, 20)), torch.full(SIZE, 1.0)
    weights = {"plain": made(source, two, 1), "strided": whole[:, ::2]}
    if mixed:
        weights["host"] = host
    with shmsync.Publisher(weights, device=place, dtype=dtype, slots=slots) as pub:
        assert lies(pub) == place
        with shmsync.Subscriber(pub.handle, timeout=30.0) as sub:
            stream = None if there is None else there.stream()
            for version in range(2, 6):
                host.fill_(version)
                if there is None:
                    weights["plain"].fill_(version)
                    whole.fill_(version)
                    pub.publish(weights)
                    weights["plain"].fill_(-1)  # copied aside, or into the host's memory
                    whole.fill_(-1)
                else:
                    with there.on(stream):
                        there.kernel(lambda: time.sleep(0.002))
                        there.kernel(lambda version=version: weights["plain"].fill_(version))
                        there.kernel(lambda version=version: whole.fill_(version))
                        pub.publish(weights)
                        there.kernel(lambda: weights["plain"].fill_(-1))
                        there.kernel(lambda: whole.fill_(-1))
                host.fill_(-1)
                sub.wait_version(version)
                sub.refresh()
                assert seen(sub) == {key: {float(version)} for key in weights}
            if dtype is not None and place == source != "cpu":
                assert there.casts > 0


@pytest.mark.parametrize("slots", [1, 2])
def test_into_host_memory_weights_that_are_not_made_in_time_are_not_published(two, slots):
    device = two["simulated:0"]
    device.pins = False
    there = made("simulated:0", two, 1)
    with shmsync.Publisher({"t": there}, device="cpu", slots=slots) as pub, shmsync.Subscriber(pub.handle) as sub:
        stream = device.stream()
        gate = device.gate(stream)
        stream.give(lambda: there.fill_(2))
        with device.on(stream):
            with pytest.raises(shmsync.WriterBusy, match="still being made on simulated:0"):
                pub.publish({"t": there}, timeout=0.1)
            assert (pub.version, seen(sub)) == (1, {"t": {1.0}})
            gate.set()
            assert pub.publish({"t": there}) == 2
        assert seen(sub) == {"t": {2.0}}


def test_after_orders_what_comes_from_a_device_into_host_memory(two):
    device = two["simulated:0"]
    there = made("simulated:0", two, 1)
    with shmsync.Publisher({"t": there}, device="cpu") as pub, shmsync.Subscriber(pub.handle) as sub:
        with pytest.raises(TypeError, match="a stream or an event"):
            pub.publish({"t": there}, after="stream")
        gathering = device.stream()
        for version in range(2, 10):
            with device.on(device.stream()):
                gathering.give(lambda: time.sleep(0.002))
                gathering.give(lambda version=version: there.fill_(version))
                assert pub.publish({"t": there}, after=gathering) == version
            assert seen(sub) == {"t": {float(version)}}
        with pytest.raises(ValueError, match="lies in the host's memory, and so do the weights"):
            pub.publish({"t": torch.ones(SIZE)}, after=gathering)


def test_after_orders_what_brings_an_adopted_parameter_back(two):
    device = two["simulated:0"]
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(made("simulated:0", two, 1), requires_grad=False)
    with shmsync.Publisher(net, device="simulated:0") as pub, shmsync.Subscriber(pub.handle) as sub:
        pub.adopt(net)
        gathering = device.stream()
        for version in range(2, 10):
            net.weight.data = there = made("simulated:0", two, 1)
            gathering.give(lambda: time.sleep(0.002))
            gathering.give(lambda there=there, version=version: there.fill_(version))
            with device.on(device.stream()):
                assert pub.publish(after=gathering, wait=[]) == version
            assert seen(sub) == {"weight": {float(version)}}


@pytest.mark.parametrize("place", PLACES)
def test_a_snapshot_is_of_one_version(two, place):
    source = {"a": torch.full(SIZE, 1.0)}
    with shmsync.Publisher(source, device=place, slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        stream = None if two[place] is None else two[place].stream()
        for version in range(2, 6):
            source["a"].fill_(version)
            pub.publish(wait=[])
            if stream is None:
                taken = sub.snapshot()
            else:
                with two[place].on(stream):
                    taken = sub.snapshot()
                while not two[place].wait(stream, 1.0):
                    pass
            for each in two.values():  # what goes into a device's memory is done in the order of its current stream
                assert each is None or each.wait(each.current(), 10.0)
            assert taken.version == version
            assert set(taken.weights["a"].flatten().tolist()) == {float(version)}


def test_a_module_is_adopted_on_a_device(two):
    device = two["simulated:0"]
    net = torch.nn.Linear(3, 2).to(device.torch_device)
    with shmsync.Publisher(net, device="simulated:0") as pub, shmsync.Subscriber(pub.handle) as sub:
        assert lies(pub) == "simulated:0"
        pub.adopt(net)
        with pub.update(wait=[]), torch.no_grad():
            net.weight.fill_(5)
        assert seen(sub)["weight"] == {5.0}
    assert set(net.weight.flatten().tolist()) == {5.0}
