"""A whole arena on a GPU: a publisher and a subscriber over the proxy of CUDA's calls."""

import gc

import pytest
import torch

import shmsync
from shmsync.errors import ProtocolError
from shmsync.memory import devices
from shmsync.memory.cuda import visible
from support.devices.standin_cuda import World


@pytest.fixture
def lie_there():
    """lie_there() lets new arenas lie on the proxy's GPU, until the end of the test."""
    before = list(devices._default)

    def make():
        device = visible.device(0)
        device.torch_device = torch.device("simulated", 0)  # for torch
        devices._default[:] = [device]

    yield make
    devices._default[:] = before


def ones_there(count):
    """A tensor of ones in the GPU's memory."""
    storage = visible.device(0).allocate(4 * count)
    return torch.empty(0, device="simulated:0").set_(storage, 0, (count,)).fill_(1)


@pytest.fixture
def arena(process, lie_there):
    """arena(weights, ...) -> its calls, a publisher on the proxy, and a subscriber that finds it by its handle."""
    opened = []

    def make(weights, slots=2, made=False, **options):
        calls = visible.device(0)._calls if made else process(World())
        lie_there()
        pub = shmsync.Publisher(weights, slots=slots, timeout=20.0)
        opened.append(pub)
        sub = shmsync.Subscriber(pub.handle, worker=0, timeout=20.0, **options)
        opened.append(sub)
        return calls, pub, sub

    yield make
    for each in reversed(opened):
        each.close()


def value(sub, key="t"):
    with sub.read() as section:
        (only,) = set(section.weights[key].tolist())
        return section.version, only


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_versions_go_through_the_calls(arena, slots):
    source = {"t": torch.full((1000,), 1.0)}
    calls, pub, sub = arena(source, slots)
    for version in range(2, 60):
        source["t"].fill_(version)
        assert pub.publish() == version
        source["t"].fill_(-1)  # copied aside
        sub.wait_version(version)
        assert value(sub) == (version, float(version))
    assert calls.names().count("cuLaunchHostFunc") >= 2 * 58  # a commit and a release for each


@pytest.mark.parametrize("slots", [1, 2])
def test_weights_of_the_gpu_are_copied_after_the_current_stream_and_before_what_comes_next(process, arena, slots):
    process(World())
    device = visible.device(0)
    there = ones_there(1000)
    calls, pub, sub = arena({"t": there}, slots, made=True)
    stream = device.stream()
    with calls.side.stream(stream.cuda_stream):
        for version in range(2, 30):
            for step in (-1, version):
                calls.kernel(lambda step=step: there.fill_(step))
            pub.publish({"t": there})
            calls.kernel(lambda: there.fill_(-2))
            sub.wait_version(version)
            assert value(sub) == (version, float(version))
    assert "cudaHostAlloc" not in calls.names()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_publish_during_a_capture_is_refused_before_anything_changes(arena, slots):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, slots)
    while not sub._reader.arena.device_slab.reads.wait(10**8):
        pass
    stream = visible.device(0).stream()
    calls.capturing.add(stream.cuda_stream)
    source["t"].fill_(2)
    before = calls.names().count("cudaMemcpyAsync")
    with calls.side.stream(stream.cuda_stream):
        with pytest.raises(ProtocolError, match="before or after the capture"):
            pub.publish()
        with pytest.raises(ProtocolError, match="before or after the capture"), pub.update():
            pass
    with pytest.raises(ProtocolError, match="before or after the capture"):
        pub.publish(after=stream)
    assert calls.names().count("cudaMemcpyAsync") == before
    assert value(sub) == (1, 1.0)
    assert pub.publish(wait=[]) == 2
    assert value(sub) == (2, 2.0)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("how", ["raises", "commits"])
def test_an_update_that_ends_in_a_capture_is_taken_back(arena, slots, how):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, slots)
    stream = visible.device(0).stream()
    with calls.side.stream(stream.cuda_stream):
        with pytest.raises(LookupError if how == "raises" else ProtocolError), pub.update():
            calls.capturing.add(stream.cuda_stream)
            if how == "raises":
                raise LookupError
        calls.capturing.clear()
        source["t"].fill_(2)
        assert pub.publish(wait=[]) >= 2
    assert value(sub)[1] == 2.0


def test_a_capture_in_a_section_of_several_slots_is_refused(arena):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, 2)
    stream = visible.device(0).stream()
    calls.capturing.add(stream.cuda_stream)
    with calls.side.stream(stream.cuda_stream), pytest.raises(ProtocolError, match="publish with slots=1"), sub.read():
        pass
    for version in (2, 3, 4):  # and the slot was let go
        source["t"].fill_(version)
        assert pub.publish(wait=[], timeout=20) == version
        assert value(sub) == (version, float(version))


def test_nothing_is_left_when_both_ends_are_closed(arena):
    calls, pub, sub = arena({"t": torch.full((100,), 1.0)}, 2)
    pub.publish(wait=[])
    value(sub)
    sub.close()
    pub.close()
    gc.collect()
    visible._used.cache_clear()
    devices._default.clear()
    gc.collect()
    assert {name: many for name, many in calls.left().items() if name in ("memory", "mappings")} == {}


def test_adopted_parameters_are_replaced_beside_a_reader_with_the_same_memory(process, arena):
    process(World())
    net = torch.nn.Linear(3, 2).to("simulated:0")
    _, pub, sub = arena(net, slots=1, made=True)
    pub.adopt(net)
    with sub.read() as section:
        assert section.weights["weight"].data_ptr() == pub.weights["weight"].data_ptr() == net.weight.data_ptr()
    net.weight = torch.nn.Parameter(torch.full_like(net.weight, 3.0))
    backup = net.bias.data
    with pytest.raises(ProtocolError, match="a tensor outside the module"):
        pub.publish()
    del backup
    assert pub.publish(wait=[]) == 2
    assert net.weight.data_ptr() == pub.weights["weight"].data_ptr()
    with sub.read() as section:
        assert set(section.weights["weight"].flatten().tolist()) == {3.0}
